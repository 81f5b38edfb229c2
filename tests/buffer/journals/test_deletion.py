"""Deletion of unneeded payload files: never before the event that freed them is on the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.buffer.journals import disk_sync
from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.journals.journal import Fsync
from asyncrl.buffer.journals.segments import RECENT_SEGMENTS
from asyncrl.buffer.ledger.events import Opened
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.experience import encode_group
from tests.buffer.ledger.parts.ledger_runs import SETTINGS
from tests.buffer.parts import GROUP_SIZE, make_group, make_store


def release_a_full_segment(journal: FileJournal) -> None:
    """Fill the first file, then commit what makes it needless, as the buffer does in one commit."""
    for ticket in (1, 2):
        journal.append(ticket, 1, [b"x" * 600])
    assert journal.commit([Opened(1, "learner")], 0.0)
    assert journal.commit([Opened(2, "learner")], 0.0)
    journal.release(1)


def first_segment(folder: Path) -> Path:
    return folder / "payloads" / "00000001.segment"


def tick_until(journal: FileJournal, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not is_so():
        journal.tick(0.0)
        assert time.monotonic() < end
        time.sleep(0.005)


def test_under_everysec_a_sync_that_fails_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_sync, "SYNC_EVERY_S", 0.01)
    failures = [OSError("no space left"), OSError("no space left")]

    def sync(descriptor: int) -> None:
        if failures:
            assert segment.exists()
            raise failures.pop()

    journal = FileJournal(tmp_path, segment_bytes=500, sync=sync)
    segment = first_segment(tmp_path)
    release_a_full_segment(journal)
    assert segment.exists()
    tick_until(journal, lambda: not segment.exists())
    assert journal.counters["failed_syncs"] == 2
    assert journal.read(2, 1) == [b"x" * 600]
    journal.close()


def test_under_everysec_a_sync_that_began_before_the_commit_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_sync, "SYNC_EVERY_S", 0.01)
    commit, begun = threading.Semaphore(0), []

    def sync(descriptor: int) -> None:
        begun.append(descriptor)
        assert commit.acquire(timeout=20.0)

    journal = FileJournal(tmp_path, segment_bytes=500, sync=sync)
    segment = first_segment(tmp_path)
    journal.commit([Opened(0, "learner")], 0.0)
    tick_until(journal, lambda: len(begun) == 1)
    release_a_full_segment(journal)
    commit.release(2)  # the first segment and the log: the first sync ends
    tick_until(journal, lambda: len(begun) == 3)
    assert segment.exists(), "the second sync has only begun"
    commit.release(100)
    tick_until(journal, lambda: not segment.exists())
    journal.close()


@pytest.mark.parametrize("fsync", ["always", "never"])
def test_where_no_sync_is_awaited_a_deletion_is_at_once(tmp_path: Path, fsync: Fsync) -> None:
    journal = FileJournal(tmp_path, fsync, segment_bytes=500)
    release_a_full_segment(journal)
    assert not first_segment(tmp_path).exists()
    journal.close()


def test_what_was_not_deleted_is_deleted_by_the_next_journal(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, segment_bytes=500)
    release_a_full_segment(journal)
    journal.close()
    assert first_segment(tmp_path).exists()
    again = FileJournal(tmp_path, segment_bytes=500)
    again.keep_only({2})
    again.commit([Opened(3, "learner")], 0.0)
    tick_until(again, lambda: not first_segment(tmp_path).exists())
    assert again.read(2, 1) == [b"x" * 600]
    again.close()


def push_next(store: ExperienceStore, version: int, rewards: tuple[float, float]) -> str:
    (grant,) = store.ledger.lease("a", version, 1, 0.0)
    group = make_group(grant.ticket, version=version, rewards=rewards)
    return store.push("a", grant.ticket, 1, encode_group(group))


def test_of_dropped_groups_the_newest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.buffer.store.MAX_KEPT_DROPPED", 2)
    store = make_store(tmp_path)
    store.ledger.describe_data(1000, "digest")
    version = store.ledger.register_version(store.ledger.open("learner"), 0)
    for _ in range(3):
        assert push_next(store, version, (1.0, 1.0)) == "dropped"
        assert store.commit(0.0)
    held = [store.journal.holds(one.id, one.attempt) for one in store.ledger.state.dropped]
    assert held == [False, True, True]
    store.journal.close()


def test_what_is_shown_of_dropped_groups_keeps_no_old_file(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, "always", segment_bytes=1500, sync=lambda descriptor: None)
    store = ExperienceStore(SETTINGS, journal, GROUP_SIZE, True, now=0.0)
    store.ledger.describe_data(1000, "digest")
    token = store.ledger.open("learner")
    for step in range(30):
        version = store.ledger.register_version(token, step)
        assert push_next(store, version, (1.0, 1.0)) == "dropped"
        for _ in range(SETTINGS.groups_per_step):
            assert push_next(store, version, (0.0, 1.0)) == "stored"
        assert store.ledger.reserve(token, step, 0.0) is not None
        store.ledger.trained(token, step)
        store.ledger.checkpointed(token, step + 1, "digest", [step + 1])
        assert store.commit(0.0)
    files = len(list((tmp_path / "payloads").glob("*.segment")))
    assert files <= RECENT_SEGMENTS + 1 < 30
    newest_dropped = store.ledger.state.dropped[-1]
    assert journal.holds(newest_dropped.id, newest_dropped.attempt), "the newest is still there to look at"
    journal.close()
