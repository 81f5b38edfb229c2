"""Loss at a crash of Redis on a slow disk: its append-only file waits, at most two seconds, for a sync.

With `appendfsync everysec` Redis answers first; while a sync is on its way it keeps new writes in its own
memory, for at most two seconds. A killed Redis loses those writes. A buffer that lives writes them again.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.ledger.events import Opened
from tests.buffer.journals.journal_parts import kill

SYNC_S = 4
SHIM = """
#include <unistd.h>
#include <sys/syscall.h>
int fdatasync(int file) { sleep(%d); return syscall(SYS_fdatasync, file); }
"""
WINDOW_S = 2.0
"""Redis' own limit."""
KILL_AFTER_S = 1.5


class Written:
    """Watches how long ago the append-only file last grew."""

    def __init__(self, server: RedisServer) -> None:
        self._folder = server._folder
        self._size, self._since = -1, 0.0

    @property
    def unchanged_s(self) -> float:
        size = sum(path.stat().st_size for path in self._folder.rglob("appendonly*") if path.is_file())
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return time.monotonic() - self._since


@pytest.fixture
def slow_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server whose syncs take `SYNC_S` seconds, until the environment is as it was."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the library that slows the disk down")
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SHIM % SYNC_S)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    server = RedisServer(tmp_path / "redis")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    server.ensure()
    monkeypatch.delenv("LD_PRELOAD")
    yield server
    server.stop()


@pytest.mark.long
@pytest.mark.parametrize("is_buffer_alive", [True, False])
def test_a_killed_redis_on_a_slow_disk_loses_two_seconds_at_most_and_a_living_buffer_nothing(
    slow_server: RedisServer, is_buffer_alive: bool
) -> None:
    journal = RedisJournal(lambda: slow_server.url, "run")
    began, acknowledged, written = time.monotonic(), {}, Written(slow_server)
    while written.unchanged_s < KILL_AFTER_S:
        ticket = len(acknowledged) + 1
        journal.append(ticket, 1, [b"x" * 1000])
        assert journal.commit([Opened(ticket, "learner")], 0.0)
        acknowledged[ticket] = time.monotonic() - began
        assert acknowledged[ticket] < 30.0, "the server never waits for its disk"
        time.sleep(0.02)
    cut = time.monotonic() - began
    kill(slow_server)
    slow_server.ensure()
    if is_buffer_alive:
        assert not journal.commit([Opened(len(acknowledged) + 1, "learner")], 0.0)
        while not journal.survey():
            time.sleep(0.01)
        assert journal.counters["redis_wiped"] == 1
        for ticket in acknowledged:
            if not journal.holds(ticket, 1):
                journal.append(ticket, 1, [b"x" * 1000])
        assert journal.begin_anew({"all": "the ledger knows"})
    journal.close()
    again = RedisJournal(lambda: slow_server.url, "run")
    past = again.recover()
    known = {event.token for event in past.events}
    if is_buffer_alive:
        known = set(acknowledged)
        assert past.snapshot == {"all": "the ledger knows"}
    lost = [ticket for ticket in acknowledged if ticket not in known or not again.holds(ticket, 1)]
    window_s = max((cut - acknowledged[ticket] for ticket in lost), default=0.0)
    print(f"{len(lost)} of {len(acknowledged)} groups lost, the oldest {window_s:.2f} s before the kill")
    assert bool(lost) is not is_buffer_alive
    assert window_s <= WINDOW_S + 0.5
    again.close()
