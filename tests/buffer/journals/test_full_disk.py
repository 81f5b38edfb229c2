"""A full disk is waited for: nobody is answered meanwhile, it is told, and nothing is lost."""

from __future__ import annotations

import asyncio
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
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.clock import SystemClock
from asyncrl.errors import DeadlineExceeded
from asyncrl.experience import encode_group
from asyncrl.obstacle import OBSTACLES, Cause
from tests.buffer.journals.journal_parts import Place, begin, push, settle
from tests.buffer.parts import GROUP_SIZE, SETTINGS, make_group


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_journal, "RETRY_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    store = Place("file", tmp_path).open_store()
    begin(store)
    settle(store)
    return store


def journal_of(store: ExperienceStore) -> FileJournal:
    assert isinstance(store.journal, FileJournal)
    return store.journal


def limit_pages(journal: FileJournal, num_pages: int) -> None:
    """Have SQLite itself answer that the disk is full (SQLITE_FULL) beyond so many pages; 0 for no limit."""
    journal._database.execute(f"PRAGMA max_page_count={num_pages or 1 << 30}")


def test_events_that_do_not_fit_are_written_when_they_do(store: ExperienceStore, tmp_path: Path) -> None:
    journal = journal_of(store)
    limit_pages(journal, 1)
    token = store.ledger.state.token
    for _ in range(500):  # the pages that it has are filled first
        store.ledger.register_version(token, 0)
        if not store.settle(0.0):
            break
    ticket = push(store)
    assert not store.settle(0.0)
    (found,) = journal.obstacles()
    assert found.cause is Cause.DISK_FULL and "database or disk is full" in found.reason
    assert str(tmp_path) in found.reason and "bytes free" in found.reason
    assert journal.status()["is_away"] and journal.counters["disk_full"] == 1
    limit_pages(journal, 0)
    settle(store)
    assert journal.obstacles() == [] and not journal.status()["is_away"]
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
    settle(store)
    journal = journal_of(store)
    segment = journal._segments._file
    assert segment is not None
    with open("/dev/full", "wb") as full:  # the kernel's own ENOSPC
        os.dup2(full.fileno(), segment)
    ticket = push(store)
    assert [one.cause for one in journal.obstacles()] == [Cause.DISK_FULL]
    assert "No space left on device" in journal.obstacles()[0].reason
    assert journal.holds(ticket, 1) and journal.read(ticket, 1) == encode_group(make_group(ticket))
    settle(store)  # the segment that took nothing was left for a new one
    assert journal.obstacles() == []
    journal.close()
    again = Place("file", tmp_path).open_store()
    assert again.ledger.state.counts[State.STORED] == 1
    assert again.journal.read(ticket, 1) == encode_group(make_group(ticket))


def test_a_snapshot_that_does_not_fit_costs_nothing(store: ExperienceStore) -> None:
    journal = journal_of(store)
    push(store)
    settle(store)
    limit_pages(journal, 1)
    journal.write_snapshot({"filler": os.urandom(1 << 20)})
    assert [one.cause for one in journal.obstacles()] == [Cause.DISK_FULL]
    limit_pages(journal, 0)
    push(store)
    settle(store)
    assert journal.obstacles() == []


def test_an_error_that_is_not_about_room_is_not_waited_for(store: ExperienceStore) -> None:
    journal = journal_of(store)
    journal._database.execute("DROP TABLE turns")
    push(store)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        store.settle(0.0)


def test_a_service_on_a_full_disk_says_so_at_once_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    store = ExperienceStore(SETTINGS, FileJournal(small_disk / "buffer"), GROUP_SIZE, True, now=0.0)
    begin(store)
    settle(store)
    service, stop = BufferService(store, SystemClock()), threading.Event()
    thread = threading.Thread(target=service.run, args=(stop,))
    ballast = small_disk / "ballast"
    thread.start()
    client = ReplicaClient(service.address, "a", 2.0)
    try:
        fill(ballast)
        end = time.monotonic() + 10.0
        while not service.status()[OBSTACLES]:
            with pytest.raises(DeadlineExceeded):
                lease_and_release(client)
            assert time.monotonic() < end, "a full disk is told within ten seconds"
        (found,) = service.status()[OBSTACLES]
        assert found["cause"] == "disk_full" and "is full (" in found["reason"]
        ballast.unlink()
        while service.status()[OBSTACLES]:
            assert time.monotonic() < end + 10.0
            time.sleep(0.05)
        lease_and_release(client)
    finally:
        stop.set()
        thread.join(10.0)
        client.close()
    assert not thread.is_alive()


def fill(ballast: Path) -> None:
    """Write until the disk takes no more."""
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(bytes(4096) for _ in range(1 << 20))


def lease_and_release(client: ReplicaClient) -> None:
    """Have events journalled."""

    async def call() -> None:
        reply = await client.lease(1, 1, 0.0)
        await client.release([grant.key for grant in reply.grants])

    asyncio.run(call())
