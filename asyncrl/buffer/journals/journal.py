"""What the buffer remembers across its own death.

Owns the order of durability: a payload is appended before the event that names it is committed, and
events are committed before anyone is answered. Events are committed in batches, one per turn of the
server loop. Invariant: an acknowledged push survives `kill -9`; `fsync` says what a power cut costs
(`always` nothing, `everysec` about a second, `never` what the kernel had not written).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgpack
import xxhash

from asyncrl.buffer.journals.segments import SEGMENT_BYTES, SegmentFolder
from asyncrl.buffer.ledger.events import Event, pack, unpack
from asyncrl.errors import CheckpointError, ConfigError, WireError
from asyncrl.wire import Frame

Fsync = Literal["everysec", "always", "never"]
_SYNCHRONOUS = {"everysec": "NORMAL", "always": "FULL", "never": "OFF"}


class Journal(Protocol):
    """Durable memory of events and payloads."""

    counters: Counter[str]

    def recover(self) -> Iterator[Event]:
        """Yield all committed events, in order."""

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        """Write a payload."""

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        """Return a payload, None if it is not there or damaged."""

    def release(self, ticket: int) -> None:
        """Forget a payload."""

    def keep_only(self, tickets: Collection[int]) -> None:
        """Forget all payloads but these."""

    def commit(self, events: Sequence[Event], now: float) -> None:
        """Make events durable, all or none."""

    def tick(self, now: float) -> None:
        """Do what is due at intervals."""

    def close(self) -> None:
        """Make all durable and let go of the files."""


class MemoryJournal:
    """Remembers nothing: `buffer.journal: none`. The buffer's death is the run's."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def recover(self) -> Iterator[Event]:
        return iter(())

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        pass

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        return None

    def release(self, ticket: int) -> None:
        pass

    def keep_only(self, tickets: Collection[int]) -> None:
        pass

    def commit(self, events: Sequence[Event], now: float) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass


class FileJournal:
    """Events in SQLite (write-ahead log), payloads in segments.

    Args:
        folder: Holds `events.sqlite` and `payloads/`; one process at a time.

    Raises:
        ConfigError: Another process has the journal open, or it cannot be written.
    """

    def __init__(self, folder: Path, fsync: Fsync = "everysec", segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fsync = fsync
        self._next_sync = 0.0
        self._is_dirty = False
        self._database = _open_database(folder / "events.sqlite", _SYNCHRONOUS[fsync])
        self._segments = SegmentFolder(folder / "payloads", segment_bytes)
        self.counters = self._segments.counters

    def recover(self) -> Iterator[Event]:
        """Yield all committed events, turn by turn.

        Raises:
            CheckpointError: A row's checksum does not fit, or the database is malformed.
        """
        try:
            for row, digest, data in self._database.execute("SELECT id, digest, data FROM turns ORDER BY id"):
                if xxhash.xxh3_64_hexdigest(data) != digest:
                    raise CheckpointError(
                        f"turn {row} of the journal is damaged", hint="Restore the journal's folder"
                    )
                yield from (unpack(values) for values in msgpack.unpackb(data))
        except (sqlite3.DatabaseError, WireError) as error:
            raise CheckpointError(
                f"the journal cannot be read: {error}", hint="Restore its folder"
            ) from error

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        self._segments.append(ticket, attempt, frames)
        self._is_dirty = True

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        return self._segments.read(ticket, attempt)

    def release(self, ticket: int) -> None:
        self._segments.release(ticket)

    def keep_only(self, tickets: Collection[int]) -> None:
        self._segments.keep_only(tickets)

    def commit(self, events: Sequence[Event], now: float) -> None:
        if not events:
            return
        if self._fsync == "always" and self._is_dirty:
            self._segments.sync()
            self._is_dirty = False
        data = msgpack.packb([pack(event) for event in events])
        self._database.execute(
            "INSERT INTO turns (digest, data) VALUES (?, ?)", (xxhash.xxh3_64_hexdigest(data), data)
        )
        self._is_dirty = self._is_dirty or self._fsync == "everysec"

    def tick(self, now: float) -> None:
        if self._fsync == "everysec" and self._is_dirty and now >= self._next_sync:
            self._sync()
            self._next_sync = now + 1.0

    def close(self) -> None:
        if self._fsync != "never":
            self._sync()
        self._segments.close()
        self._database.close()

    def _sync(self) -> None:
        self._segments.sync()
        self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._is_dirty = False


def _open_database(path: Path, synchronous: str) -> sqlite3.Connection:
    try:
        # The server's thread is the only user; it need not be the thread that built the service.
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
        database.execute("PRAGMA locking_mode=EXCLUSIVE")
        database.execute("PRAGMA journal_mode=WAL").fetchall()
        database.execute(f"PRAGMA synchronous={synchronous}")
        database.execute("CREATE TABLE IF NOT EXISTS turns (id INTEGER PRIMARY KEY, digest TEXT, data BLOB)")
        with contextlib.closing(database.execute("BEGIN IMMEDIATE")):
            database.execute("COMMIT")
    except sqlite3.Error as error:
        raise ConfigError(
            f"the journal {path} cannot be opened: {error}",
            hint="Stop the other run, or give this one a new name",
        ) from error
    return database
