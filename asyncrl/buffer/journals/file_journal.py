"""The journal in files: events in SQLite, payloads in segments.

Owns one folder. All events are kept, so that the whole past can be checked afterwards; snapshots only
spare a restart the way through them. Invariant: what was committed survives the end of the process
under every `fsync`; a power cut costs nothing under `always`, and under `everysec` what was committed
since the last sync but one began, see `unsynced_s`, and no checkpoint. Payloads are deleted once the
commits that made them needless are as safe as that `fsync` makes them.

A disk that is full or read-only is waited for, as a Redis that is away is: what it did not take is kept in
memory and written again, and nobody is answered before it is.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from asyncrl.buffer.journals.disk_sync import DiskSync
from asyncrl.buffer.journals.event_database import BLOCK_COMMITS, EVENTS, EventDatabase
from asyncrl.buffer.journals.journal import (
    EVENTS_PER_SNAPSHOT,
    Commit,
    Fsync,
    Need,
    Recovery,
    pack_commit,
)
from asyncrl.buffer.journals.segments import SEGMENT_BYTES, SegmentFolder
from asyncrl.buffer.ledger.events import Checkpointed, Event
from asyncrl.core.errors import ConfigError
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.status.service import FileJournalStatus
from asyncrl.core.wire import Frame

log = logging.getLogger(__name__)

_SYNCHRONOUS = {"everysec": "NORMAL", "always": "FULL", "never": "OFF"}
LITTLE_BYTES = 1 << 20
RETRY_S = 1.0
"""Between two tries to write to a disk that takes nothing."""
SLOW_S = 5.0
"""Time that one write may take before it is reported."""


class NotSynced(OSError):
    """The disk failed to sync data that must be on it before an acknowledgement."""


class FileJournal:
    """See the module.

    Args:
        folder: Holds `events.sqlite` and `payloads/`; one process at a time.
        sync: Forces a file to the disk.
        runtime: Of the process; who only reads needs none.

    Raises:
        ConfigError: Another process has the journal open, or it cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        fsync: Fsync = "everysec",
        segment_bytes: int = SEGMENT_BYTES,
        events_per_snapshot: int = EVENTS_PER_SNAPSHOT,
        block_commits: int = BLOCK_COMMITS,
        sync: Callable[[int], None] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        sync = sync or os.fsync
        self._runtime = runtime or ThreadRuntime()
        folder.mkdir(parents=True, exist_ok=True)
        self._fsync = fsync
        self._events_per_snapshot = events_per_snapshot
        self._num_new_events = 0
        self._has_new_payload = False
        self._has_checkpoint = False
        self._lock = _take_lock(folder / "lock")
        self._database = EventDatabase(folder / EVENTS, _SYNCHRONOUS[fsync], block_commits)
        self._segments = SegmentFolder(folder / "payloads", segment_bytes, sync, fsync == "everysec")
        self._deletable: list[int] = []
        self.counters = self._segments.counters
        self._disk = DiskSync(self._runtime, folder / f"{EVENTS}-wal", sync, self.counters)
        self._folder = folder
        self._unwritten: dict[tuple[int, int], list[bytes]] = {}
        self._backlog: list[tuple[str, bytes, float, int]] = []
        self._refusal = ""
        self._is_read_only = False
        self._next_try = 0.0
        self._writing_since: float | None = None

    @property
    def need(self) -> Need:
        return Need.SNAPSHOT if self._num_new_events >= self._events_per_snapshot else Need.NOTHING

    def recover(self) -> Recovery:
        """Return the newest whole snapshot and the events after it.

        Raises:
            CheckpointError: A row's checksum does not fit, or the database is malformed.
        """
        commit, values = self._database.newest_snapshot(self.counters)
        events = [event for row in self.commits(commit) for event in row.events]
        self._num_new_events = len(events)
        return Recovery(values, events)

    def events(self) -> Iterator[Event]:
        """Yield all events of the run from its beginning.

        Raises:
            CheckpointError: As `recover`.
        """
        for commit in self.commits():
            yield from commit.events

    def commits(self, after: int = 0) -> Iterator[Commit]:
        """Yield the commits of the run after commit `after`.

        Raises:
            CheckpointError: As `recover`.
        """
        return self._database.commits(after)

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        if self._refusal:  # in order: what came first is written first
            self._keep(ticket, attempt, frames)
            return
        try:
            self._segments.append(ticket, attempt, frames)
            self._has_new_payload = True
        except OSError as error:
            self._note_refusal(error)
            self._keep(ticket, attempt, frames)

    def _keep(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        self._unwritten[ticket, attempt] = [bytes(frame) for frame in frames]

    def holds(self, ticket: int, attempt: int) -> bool:
        return (ticket, attempt) in self._unwritten or self._segments.holds(ticket, attempt)

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        return self._unwritten.get((ticket, attempt)) or self._segments.read(ticket, attempt)

    def release(self, ticket: int) -> None:
        for key in [key for key in self._unwritten if key[0] == ticket]:
            del self._unwritten[key]
        self._segments.release(ticket)

    def is_recent(self, ticket: int) -> bool:
        return self._segments.is_recent(ticket)

    def keep_only(self, tickets: Collection[int]) -> None:
        self._unwritten = {key: frames for key, frames in self._unwritten.items() if key[0] in tickets}
        self._segments.keep_only(tickets)

    def commit(self, events: Sequence[Event], now: float) -> bool:
        if events:
            data, digest = pack_commit(events)
            self._backlog.append((digest, data, self._runtime.wall_ns() / 1e9, len(events)))
            # The learner removes older checkpoints once this one is acknowledged: it must not be undone.
            has_one = any(isinstance(event, Checkpointed) for event in events)
            self._has_checkpoint |= has_one and self._fsync == "everysec"
        if not (self._backlog or self._unwritten or self._has_checkpoint):
            return True
        if self._refusal and self._runtime.now() < self._next_try:
            return False
        self._writing_since = self._runtime.now()
        try:
            self._write()
        except (OSError, sqlite3.OperationalError) as error:
            self._note_refusal(error)
            return False
        finally:
            self._writing_since = None
        if self._refusal:
            log.warning("the disk of %s takes what is written again", self._folder)
            self._refusal = ""
        return True

    def _write(self) -> None:
        """Write the backlog, payloads first; each entry is kept until it is written."""
        for ticket, attempt in list(self._unwritten):
            self._segments.append(ticket, attempt, self._unwritten[ticket, attempt])
            del self._unwritten[ticket, attempt]
            self._has_new_payload = True
        if self._fsync == "always" and self._has_new_payload:
            self._segments.sync()
        self._has_new_payload = False
        while self._backlog:
            digest, data, time_s, num_events = self._backlog[0]
            self._database.append(digest, data, time_s)
            del self._backlog[0]
            self._num_new_events += num_events
        if self._fsync == "everysec":
            self._disk.note_commit()
            if self._has_checkpoint and not self._disk.sync_now(self._segments.take_unsynced):
                raise NotSynced("the commit of a checkpoint could not be synced")
            self._has_checkpoint = False
        elif self._fsync == "never":
            self._segments.forget_finished()
        self._pack()

    def _pack(self) -> None:
        """Pack old commits, if the disk takes it: what is committed is committed, and takes more room."""
        try:
            self._database.pack()
        except sqlite3.OperationalError as error:
            if not is_about_disk(error, self._folder):
                raise

    def _note_refusal(self, error: OSError | sqlite3.OperationalError) -> None:
        """Wait for the disk; raise `error` again if it is not about that."""
        if not is_about_disk(error, self._folder):
            raise error
        self._is_read_only = is_about_reading(error)
        if not self._refusal:
            self.counters["disk_full"] += 1
            log.error("%s (%s): the buffer waits for it", self._describe_disk(), error)
        self._refusal = f"{error}"
        self._next_try = self._runtime.now() + RETRY_S

    def write_snapshot(self, values: Mapping[str, object]) -> None:
        try:
            self._database.write_snapshot(values)
        except sqlite3.OperationalError as error:
            self._note_refusal(error)  # the events are there: it only spares a restart the way through them
        else:
            self._num_new_events = 0

    def survey(self) -> bool:
        return True

    def begin_anew(self, values: Mapping[str, object]) -> bool:
        raise AssertionError("a file journal never asks for this")

    def wake_at(self) -> float:
        if self._refusal:
            return self._next_try
        return self._disk.next_sync if self._fsync == "everysec" else math.inf

    def listen(self, call: Callable[[], None]) -> None:
        self._disk.on_end = call

    def tick(self, now: float) -> None:
        if self._fsync == "everysec":
            if self._disk.take_success():
                self._delete()
            if self._disk.sync_if_due(self._segments.take_unsynced):
                self._deletable = self._segments.unneeded()

    def _delete(self) -> None:
        """Delete files that are not needed; a deletion that fails is retried after the next sync."""
        try:
            self._segments.delete(self._deletable)
        except OSError as error:
            self._note_refusal(error)
        self._deletable = []

    def status(self) -> FileJournalStatus:
        is_away = bool(self._refusal)
        return FileJournalStatus(is_away=is_away, fsync=self._fsync, unsynced_s=self._disk.unsynced_s)

    def obstacles(self) -> list[Obstacle]:
        since = self._writing_since  # one look: the buffer's own thread may be done just now
        if self._refusal:
            what = f"{self._describe_disk()}, and nothing can be journalled: {self._refusal}"
            return [Obstacle("", Cause.DISK_FULL, what)]
        if since is None or (took_s := self._runtime.now() - since) < SLOW_S:
            return []
        what = f"the disk of {self._folder} has not finished a write for {took_s:.0f} s"
        return [Obstacle("", Cause.JOURNAL_AWAY, f"{what}, and what is not journalled is not done")]

    def _describe_disk(self) -> str:
        if self._is_read_only:
            return f"the disk of {self._folder} is read-only"
        if self._has_checkpoint:
            return f"the disk of {self._folder} does not sync"
        free = shutil.disk_usage(self._folder).free
        return f"the disk of {self._folder} is full ({free:,} bytes free)"

    def close(self) -> None:
        self._disk.close()
        if self._fsync != "never":
            self._segments.sync()
        self._segments.close()
        self._database.close(is_synced=self._fsync != "never")
        os.close(self._lock)


def is_about_disk(error: OSError | sqlite3.OperationalError, folder: Path) -> bool:
    """Tell whether an error says that the disk of `folder`, or a quota on it, takes no more, or nothing.

    SQLite calls it an I/O error where its index of the log, a mapped file, cannot grow.
    """
    if is_about_reading(error):
        return True
    if isinstance(error, OSError):
        return isinstance(error, NotSynced) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    code = error.sqlite_errorcode & 0xFF
    is_full = code == sqlite3.SQLITE_IOERR and shutil.disk_usage(folder).free < LITTLE_BYTES
    return code == sqlite3.SQLITE_FULL or is_full


def is_about_reading(error: OSError | sqlite3.OperationalError) -> bool:
    """Tell whether an error says that nothing may be written."""
    if isinstance(error, OSError):
        return error.errno == errno.EROFS
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY


def _take_lock(path: Path) -> int:
    """Return the descriptor that keeps every other buffer from this journal while it is open."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"the journal {path.parent} cannot be opened: another buffer works on it",
            hint="Stop the other run, or give this one a new name",
        ) from error
    return lock
