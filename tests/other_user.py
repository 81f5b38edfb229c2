"""Another user of the machine, as whom a test acts for a moment, or starts a program."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY, SOMEBODY = 65_534, 1_234
"""A stranger, and an ordinary user who has a run: root may do everything, so that it meets no refusal."""
CHECKOUT = Path(__file__).parents[1]
THROUGH = """
cd "$2" && mount -t tmpfs -o mode=755 none "$1" && mkdir -p "$2" && mount -c --bind . "$2" &&
cd "$OLDPWD" && shift 2 && exec "$@"
"""
"""Has a program see, of a folder that is closed to others, what Python is in, and nothing else."""


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Have the kernel treat this process as the user `uid`; skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def command_as(uid: int, *command: str) -> list[str]:
    """Return what starts `command` as the user `uid` for good; skips the test where that is not allowed."""
    if os.geteuid() != 0 or not (shutil.which("setpriv") and shutil.which("unshare")):
        pytest.skip("only root can start a program as another user, with setpriv and unshare")
    if _closed_above(CHECKOUT):
        pytest.skip("the checkout is closed to other users")
    switched = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]
    closed = _closed_above(Path(sys.base_prefix))
    if not closed:
        return switched
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("Python is closed to other users, and nothing may be mounted here")
    return ["unshare", "--mount", "sh", "-c", THROUGH, "sh", str(closed[-1]), sys.base_prefix, *switched]


def _closed_above(path: Path) -> list[Path]:
    """Return the folders above `path`, the highest last, that other users cannot pass."""
    return [folder for folder in path.parents if not folder.stat().st_mode & stat.S_IXOTH]
