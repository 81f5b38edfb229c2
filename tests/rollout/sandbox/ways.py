"""Ways to isolate, for tests: namespaces of root and of an ordinary user, bubblewrap; and what still runs."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from rollout_service.sandbox import local
from rollout_service.sandbox.contract import SandboxSettings

SHORT = ["root" if os.geteuid() == 0 else "ordinary user"]
ALL = ["root", "ordinary user", "bubblewrap"]
DEBIAN = "/usr/bin/python3"
"""A Python that an ordinary user may read, wherever that of the tests lies."""
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")


def enter(way: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., local.LocalSandboxes]:
    """Return a maker of sandboxes that are isolated in this way; skips a way that there is not."""
    if way == "root":
        if os.geteuid() != 0:
            pytest.skip("these tests do not run as root")
    elif os.geteuid() == 0:
        if not os.path.exists(DEBIAN):
            pytest.skip(f"no {DEBIAN} for another user")
        monkeypatch.setattr(local, "PYTHON", DEBIAN)
        monkeypatch.setattr(local, "PATH", "/usr/bin:/bin")
        monkeypatch.setattr(sys, "base_prefix", "/usr")
        monkeypatch.setattr(local, "command_line", functools.partial(_as_nobody, local.command_line))
    if way == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    used = local.BUBBLEWRAP if way == "bubblewrap" else local.NAMESPACES
    monkeypatch.setattr(local, "find_way", lambda: used)
    return lambda **settings: local.LocalSandboxes(SandboxSettings(**settings))


def _as_nobody(command_line: Callable[..., list[str]], *told: Any, **named: Any) -> list[str]:
    return [*AS_NOBODY, *command_line(*told, **named)]


def with_marker(marker: str) -> list[int]:
    """Return the processes with a word in their arguments that holds `marker`."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if any(marker in word for word in process.cmdline()) else []
        except psutil.Error:
            continue
    return found
