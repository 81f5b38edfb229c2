"""A whole run over TCP with keys: it trains, and what it leaves says no secret."""

from __future__ import annotations

import contextlib
import re
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.errors import DeadlineExceeded, NotAllowed
from asyncrl.core.sockets.keys import make_run_keys, read_client_keys
from tests.system.parts.up_run import UpRun, leftovers


def await_text(path: Path, pattern: str) -> re.Match[str]:
    """Return the first match of `pattern` in a file that a run is about to write."""
    end = time.monotonic() + 120.0
    while True:
        text = path.read_text() if path.exists() else ""
        if found := re.search(pattern, text):
            return found
        assert time.monotonic() < end, f"no {pattern} in {path}: {text[-2000:]}"
        time.sleep(0.2)


def address_of(log: Path) -> str:
    """Return where the buffer says that it listens."""
    return await_text(log, r"the buffer listens on (\S+)").group(1)


def own_host() -> str:
    """Return an address of this machine that others may reach, loopback if it has none."""
    addresses = [one for found in psutil.net_if_addrs().values() for one in found]
    found = [one.address for one in addresses if one.family is socket.AddressFamily.AF_INET]
    return next((one for one in found if not one.startswith("127.")), "127.0.0.1")


@pytest.mark.long
def test_a_run_with_keys_trains_lets_no_stranger_in_and_writes_no_secret(
    up: Callable[..., UpRun], digit_sort: Path
) -> None:
    host = own_host()
    sets = (f"launcher.host={host}", "launcher.curve=on", "learner.steps=6", "eval.every_steps=0")
    run = up("keyed", *sets)
    paths = (run.folder / "keys.json", run.folder / "service_keys.json")
    for path in paths:
        await_text(path, "public")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    generators, keys = map(read_client_keys, paths)
    address = address_of(run.folder / "logs" / "buffer.0.log")
    assert address.startswith(f"tcp://{host}:")
    with contextlib.closing(LearnerClient(address, deadline_s=20.0, keys=keys)) as learner:
        assert learner.status().residue == 0
    with contextlib.closing(LearnerClient(address, token=9, deadline_s=20.0, keys=generators)) as pretender:
        assert pretender.status().residue == 0
        with pytest.raises(NotAllowed):
            pretender.open("generator")
    others = replace(make_run_keys().client, server=keys.server)
    with (
        contextlib.closing(LearnerClient(address, deadline_s=2.0, keys=others)) as stranger,
        pytest.raises(DeadlineExceeded),
    ):
        stranger.status()
    run.wait_for(lambda status: status.get("step", 0) >= 1, deadline_s=200.0)
    code, output = run.finish()
    assert code == 0, output
    assert len(run.rows()) == 6
    assert run.summary()["ledger_residue"] == 0
    assert not any(path.exists() for path in paths)
    written = [file.read_bytes() for file in run.folder.rglob("*") if file.is_file()]
    assert not [text for text in written if keys.secret in text or generators.secret in text]
    assert leftovers(run.folder) == []
