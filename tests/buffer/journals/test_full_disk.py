"""A full, a read-only and a slow disk are waited for: nobody is answered, it is told, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.journals import file_journal
from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.ledger.tickets import State
from asyncrl.buffer.service import BufferService, RequestHandler
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.experience import encode_group
from asyncrl.core.obstacle import Cause
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from tests.buffer.journals.journal_parts import Place, begin, commit, push
from tests.buffer.parts import GROUP_SIZE, SETTINGS, make_group
from tests.runtimes import ManualClock
from tests.small_disk import fill


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_journal, "RETRY_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    store = Place("file", tmp_path).open_store()
    begin(store)
    commit(store)
    return store


def journal_of(store: ExperienceStore) -> FileJournal:
    assert isinstance(store.journal, FileJournal)
    return store.journal


def limit_pages(journal: FileJournal, num_pages: int) -> None:
    """Have SQLite itself answer that the disk is full (SQLITE_FULL) beyond so many pages; 0 for no limit."""
    journal._database._database.execute(f"PRAGMA max_page_count={num_pages or 1 << 30}")


def test_events_that_do_not_fit_are_written_when_they_do(store: ExperienceStore, tmp_path: Path) -> None:
    journal = journal_of(store)
    limit_pages(journal, 1)
    token = store.ledger.state.token
    for _ in range(500):  # the pages that it has are filled first
        store.ledger.register_version(token, 0)
        if not store.commit(0.0):
            break
    ticket = push(store)
    assert not store.commit(0.0)
    (found,) = journal.obstacles()
    assert found.cause is Cause.DISK_FULL and "database or disk is full" in found.reason
    assert str(tmp_path) in found.reason and "bytes free" in found.reason
    assert journal.status().is_away and journal.counters["disk_full"] == 1
    limit_pages(journal, 0)
    commit(store)
    assert journal.obstacles() == [] and not journal.status().is_away
    last_number = store.ledger.state.versions.last_number
    journal.close()
    again = Place("file", tmp_path).open_store()
    assert again.ledger.state.versions.last_number == last_number > 2
    assert again.ledger.state.counts[State.STORED] == 1 and again.journal.holds(ticket, 1)


def test_a_payload_that_does_not_fit_is_kept_and_written_before_its_event(
    tmp_path: Path,
) -> None:
    store = Place("file", tmp_path, settings={"fsync": "never"}).open_store()
    begin(store)
    commit(store)
    journal = journal_of(store)
    segment = journal._segments._file
    assert segment is not None
    with open("/dev/full", "wb") as full:  # the kernel's own ENOSPC
        os.dup2(full.fileno(), segment)
    ticket = push(store)
    assert [one.cause for one in journal.obstacles()] == [Cause.DISK_FULL]
    assert "No space left on device" in journal.obstacles()[0].reason
    assert journal.holds(ticket, 1) and journal.read(ticket, 1) == encode_group(make_group(ticket))
    commit(store)  # the segment that took nothing was left for a new one
    assert journal.obstacles() == []
    journal.close()
    again = Place("file", tmp_path).open_store()
    assert again.ledger.state.counts[State.STORED] == 1
    assert again.journal.read(ticket, 1) == encode_group(make_group(ticket))


def test_a_snapshot_that_does_not_fit_costs_nothing(store: ExperienceStore) -> None:
    journal = journal_of(store)
    push(store)
    commit(store)
    limit_pages(journal, 1)
    journal.write_snapshot({"filler": os.urandom(1 << 20)})
    assert [one.cause for one in journal.obstacles()] == [Cause.DISK_FULL]
    limit_pages(journal, 0)
    push(store)
    commit(store)
    assert journal.obstacles() == []


def test_a_disk_that_became_read_only_is_waited_for(
    store: ExperienceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_of(store)
    journal._database._database.execute("PRAGMA query_only=ON")  # SQLite's own SQLITE_READONLY
    ticket = push(store)
    assert not store.commit(0.0)
    (found,) = journal.obstacles()
    assert found.reason.startswith(f"the disk of {tmp_path} is read-only, and nothing can be journalled: ")
    journal._database._database.execute("PRAGMA query_only=OFF")
    commit(store)
    assert journal.obstacles() == []

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        patched.setattr(os, "ftruncate", refuse)
        patched.setattr(os, "open", refuse)
        with pytest.raises(OSError, match="Read-only"):
            journal._segments.append(ticket, 2, [b"x"])
        journal.append(ticket, 2, [b"x"])
    assert "is read-only" in journal.obstacles()[0].reason and journal.holds(ticket, 2)
    commit(store)
    assert journal.obstacles() == [] and journal.read(ticket, 2) == [b"x"]


def test_files_that_a_read_only_disk_keeps_are_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Place("file", tmp_path, settings={"segment_bytes": 1}).open_store()
    begin(store)
    ticket = push(store)
    commit(store)
    journal = journal_of(store)
    path = journal._segments._path(1)
    journal.release(ticket)
    journal._deletable = journal._segments.unneeded()
    with monkeypatch.context() as patched:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        patched.setattr(Path, "unlink", refuse)
        journal._delete()
    assert path.exists() and journal.obstacles()
    journal._deletable = journal._segments.unneeded()
    journal._delete()
    assert not path.exists()


def test_a_write_that_takes_long_is_told_while_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_journal, "SLOW_S", 0.0)
    may_end = ThreadEvent()

    def sync(file: int) -> None:
        assert may_end.wait(60.0)

    store = Place("file", tmp_path, settings={"fsync": "always", "sync": sync}).open_store()
    begin(store)
    push(store)
    writing = threading.Thread(target=commit, args=(store,))
    writing.start()
    journal, end = journal_of(store), time.monotonic() + 30.0
    while not (found := journal.obstacles()):
        assert time.monotonic() < end
        time.sleep(0.01)
    may_end.set()
    writing.join(120.0)
    assert found[0].cause is Cause.JOURNAL_AWAY and "has not finished a write for" in found[0].reason
    assert journal.obstacles() == []


def test_no_lease_runs_out_in_a_turn_that_the_disk_held_up(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = {"fsync": "always", "sync": lambda file: clock.advance(SETTINGS.lease_s + 1.0)}
    store = Place("file", tmp_path, settings=settings).open_store()
    begin(store)
    store.ledger.lease("a", 1, 1, clock.now())
    push(store, clock.now())
    handler = RequestHandler(store, clock)
    handler.end_turn()
    handler.tick(clock.now())
    assert clock.now() > SETTINGS.lease_s, "the disk was slow"
    assert store.ledger.state.counts[State.LEASED] == 1 and handler.counters["slow_turns"] == 1


def test_an_error_that_is_not_about_room_is_not_waited_for(store: ExperienceStore) -> None:
    journal = journal_of(store)
    journal._database._database.execute("DROP TABLE turns")
    push(store)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        store.commit(0.0)


def test_a_service_on_a_full_disk_says_so_at_once_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    store = ExperienceStore(SETTINGS, FileJournal(small_disk / "buffer"), GROUP_SIZE, True, now=0.0)
    begin(store)
    commit(store)
    service, stop = BufferService(store, ThreadRuntime()), ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,))
    ballast = small_disk / "ballast"
    thread.start()
    client = ReplicaClient(service.address, "a", 2.0)
    try:
        fill(ballast)
        with pytest.raises(DeadlineExceeded):
            lease_and_release(client)
        end = time.monotonic() + 60.0
        while not service.status().obstacles:
            assert time.monotonic() < end, "nobody says that the disk is full"
            time.sleep(0.05)
        (found,) = service.status().obstacles
        assert found.cause == "disk_full" and "is full (" in found.reason
        ballast.unlink()
        while service.status().obstacles:
            assert time.monotonic() < end + 60.0
            time.sleep(0.05)
        with contextlib.closing(ReplicaClient(service.address, "a", 60.0)) as patient:
            lease_and_release(patient)
    finally:
        stop.set()
        thread.join(60.0)
        client.close()
    assert not thread.is_alive()


def lease_and_release(client: ReplicaClient) -> None:
    """Have events journalled."""

    async def call() -> None:
        reply = await client.lease(1, 1, 0.0)
        await client.release([grant.key for grant in reply.grants])

    asyncio.run(call())
