"""Journals of every kind behind one door, for the tests that hold for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.journals.journal import Journal
from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.journals.redis.link import RedisLink
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.experience import encode_group
from tests.buffer.parts import GROUP_SIZE, SETTINGS, make_group
from tests.simulation.parts.journal import Disk, SimulatedJournal


@dataclass
class Place:
    """Where the journals of one test live, one after the other."""

    kind: str
    folder: Path
    server: RedisServer | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    disk: Disk = field(default_factory=Disk)

    @property
    def run(self) -> str:
        return self.folder.name

    def open(self) -> Journal:
        """Open the journal, as the next buffer process would."""
        if self.kind == "simulated":
            return SimulatedJournal(self.disk, True, **self.settings)
        if self.server is None:
            return FileJournal(self.folder, **self.settings)
        url = self.server.url
        return RedisJournal(lambda: url, self.run, **self.settings)

    def open_store(self, **changes: Any) -> ExperienceStore:
        return ExperienceStore(SETTINGS, self.open(), GROUP_SIZE, True, now=0.0)

    def damage_payload(self, ticket: int) -> None:
        """Flip a bit in the body of a ticket's payload."""
        if self.kind == "simulated":
            (key,) = [key for key in self.disk.payloads if key[0] == ticket]
            self.disk.payloads[key] = []
            return
        if self.server is None:
            path = max(path for path in self.folder.rglob("*.segment") if path.stat().st_size)
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            return
        with raw_link(self.server.url) as link:
            key = f"asyncrl:{{{self.run}}}:payloads"
            for name in link.call("HKEYS", key):
                if name.startswith(f"{ticket}:".encode()):
                    record = bytearray(link.call("HGET", key, name))
                    record[-1] ^= 1
                    link.call("HSET", key, name, bytes(record))

    def damage_turn(self) -> None:
        """Flip a bit in the newest commit's events."""
        assert self.server is not None
        with raw_link(self.server.url) as link:
            key = f"asyncrl:{{{self.run}}}:turns"
            ((name, (_, data, *rest)),) = link.call("XREVRANGE", key, "+", "-", "COUNT", "1")
            link.call("XDEL", key, name)
            link.call("DEL", key)
            link.call("XADD", key, name, "data", bytes([data[0] ^ 1]) + data[1:], *rest)


@contextlib.contextmanager
def raw_link(url: str):
    """A second connection, to look behind the journal's back."""
    link = RedisLink(url)
    link.connect()
    try:
        yield link
    finally:
        link.close()


def wipe(server: RedisServer) -> None:
    """Delete all keys, as `FLUSHALL` does; the server's user may not call that."""
    with raw_link(server.url) as link:
        for key in link.call("SCAN", "0", "COUNT", "10000")[1]:
            link.call("DEL", key)


def kill(server: RedisServer) -> None:
    """End the server with SIGKILL and wait until it is gone."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while server.pid is not None:
        time.sleep(0.005)


def begin(store: ExperienceStore) -> int:
    """Describe data, open a learner, register version 1; return the fencing token."""
    store.ledger.describe_data(100, "digest")
    token = store.ledger.open("learner")
    store.ledger.register_version(token, 0)
    return token


def push(store: ExperienceStore, now: float = 0.0) -> int:
    """Lease and push one group without committing; return its ticket."""
    (grant,) = store.ledger.lease("a", store.ledger.state.versions.last_number, 1, now)
    group = make_group(grant.ticket, grant.attempt, store.ledger.state.versions.last_number)
    assert store.push("a", grant.ticket, grant.attempt, encode_group(group)) == "stored"
    return grant.ticket


def commit(store: ExperienceStore, deadline_s: float = 30.0) -> None:
    """Commit until it is done."""
    end = time.monotonic() + deadline_s
    while not store.commit(0.0):
        assert time.monotonic() < end, "the journal did not come back"
        time.sleep(0.01)
