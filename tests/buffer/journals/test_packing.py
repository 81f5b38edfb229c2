"""Old commits in blocks: read as they were written, whatever happens while they are packed."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.buffer.journals import event_database
from asyncrl.buffer.journals.event_database import EVENTS, FORMAT, read_commits, read_newest
from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.ledger.events import Event, Opened
from asyncrl.core.errors import CheckpointError
from asyncrl.core.runtime import faults

BLOCK = 4


def make(folder: Path, block_commits: int = BLOCK) -> FileJournal:
    return FileJournal(folder, "never", block_commits=block_commits)


def write(journal: FileJournal, *numbers: int) -> None:
    for number in numbers:
        assert journal.commit([Opened(number, "learner")], 0.0)


def events(*numbers: int) -> list[Event]:
    return [Opened(number, "learner") for number in numbers]


def ask(folder: Path, query: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(folder / EVENTS)) as database:
        found = database.execute(query).fetchall()
        database.commit()
        return found


@pytest.fixture
def on_packing() -> Iterator[list[BaseException]]:
    """Have the errors that a test puts there raised, one each time that a block is written."""
    errors: list[BaseException] = []

    def strike(name: str, place: tuple[int | None, ...]) -> None:
        if name == "buffer.packing" and errors:
            raise errors.pop(0)

    before = faults.set_hook(strike)
    yield errors
    faults.set_hook(before)


def test_packed_turns_are_read_as_they_were_written(tmp_path: Path) -> None:
    plain, packed = make(tmp_path / "plain", 1000), make(tmp_path / "packed")
    for journal in (plain, packed):
        write(journal, *range(1, 11))
        journal.write_snapshot({"token": 10})
        write(journal, *range(11, 23))
    assert ask(tmp_path / "packed", "SELECT last FROM blocks") == [(4,), (8,), (12,), (16,)]
    assert ask(tmp_path / "packed", "SELECT COUNT(*), MIN(id) FROM turns") == [(6, 17)]
    packed.close()
    plain.close()
    found = read_commits(tmp_path / "packed")
    assert [commit.events for commit in found] == [
        commit.events for commit in read_commits(tmp_path / "plain")
    ]
    assert [commit.number for commit in found] == list(range(1, 23))
    times = [commit.time_s for commit in found]
    assert None not in times and times == sorted(times)  # type: ignore[type-var]
    values, newer = read_newest(tmp_path / "packed")  # the snapshot is of a commit within a block
    assert values == {"token": 10} and [commit.number for commit in newer] == list(range(11, 23))
    again = make(tmp_path / "packed")
    past = again.recover()
    assert past.snapshot == {"token": 10} and list(past.events) == events(*range(11, 23))
    write(again, 23)
    assert [commit.number for commit in again.commits(15)] == list(range(16, 24))
    again.close()


def test_a_block_takes_less_than_half_of_its_turns(tmp_path: Path) -> None:
    sizes = []
    for name, block_commits, table in (("plain", 1000, "turns WHERE id <= 800"), ("packed", 100, "blocks")):
        journal = make(tmp_path / name, block_commits)
        write(journal, *range(1, 901))
        journal.close()
        ((size,),) = ask(tmp_path / name, f"SELECT SUM(LENGTH(data)) + SUM(LENGTH(digest)) FROM {table}")
        assert isinstance(size, int)
        sizes.append(size)
    assert sizes[1] < sizes[0] / 2


def test_a_block_is_bounded_in_bytes_and_takes_one_turn_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_database, "BLOCK_BYTES", 100)
    journal = make(tmp_path)
    for _ in range(12):
        assert journal.commit(events(*range(1, 9)), 0.0)  # 8 events: over 100 bytes
    journal.close()
    assert ask(tmp_path, "SELECT last FROM blocks") == [(number,) for number in range(1, 6)]
    assert len(read_commits(tmp_path)) == 12


def test_a_reader_beside_a_buffer_that_packs_sees_each_turn_once(tmp_path: Path) -> None:
    journal = make(tmp_path, 5)
    write(journal, *range(1, 13))  # a block, and commits that will be one
    with event_database._reading(tmp_path) as database:
        reading = event_database._read_commits(database, 0)
        first = next(reading)
        write(journal, *range(13, 31))
        assert ask(tmp_path, "SELECT COUNT(*) FROM blocks") == [(5,)]
        assert [first.number, *(commit.number for commit in reading)] == list(range(1, 13))
    journal.close()


def test_a_buffer_that_ends_while_it_packs_loses_no_turn(
    tmp_path: Path, on_packing: list[BaseException]
) -> None:
    journal = make(tmp_path)
    write(journal, *range(1, 8))
    on_packing.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write(journal, 8)
    journal.close()
    assert ask(tmp_path, "SELECT COUNT(*) FROM blocks") == [(0,)]
    again = make(tmp_path)
    assert list(again.events()) == events(*range(1, 9))
    write(again, 9)
    assert ask(tmp_path, "SELECT last FROM blocks") == [(4,)]
    assert list(again.events()) == events(*range(1, 10))
    again.close()


def test_a_disk_without_room_for_a_block_holds_up_nothing_and_is_tried_again(
    tmp_path: Path, on_packing: list[BaseException]
) -> None:
    journal = make(tmp_path)
    write(journal, *range(1, 8))
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    on_packing.append(error)
    write(journal, 8)
    assert journal.obstacles() == [] and ask(tmp_path, "SELECT last FROM blocks") == []
    write(journal, *range(9, 12))
    assert ask(tmp_path, "SELECT last FROM blocks") == []
    write(journal, 12)
    assert ask(tmp_path, "SELECT last FROM blocks") == [(4,)]
    assert list(journal.events()) == events(*range(1, 13))
    journal.close()


def test_an_error_of_packing_that_is_not_about_room_is_raised(
    tmp_path: Path, on_packing: list[BaseException]
) -> None:
    journal = make(tmp_path)
    write(journal, *range(1, 8))
    error = sqlite3.OperationalError("no such table: blocks")
    error.sqlite_errorcode = sqlite3.SQLITE_ERROR
    on_packing.append(error)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        write(journal, 8)
    journal.close()
    assert len(read_commits(tmp_path)) == 8


def test_a_journal_whose_turns_are_malformed_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    journal = make(tmp_path)
    write(journal, *range(1, 4))
    journal.close()
    ((root,),) = ask(tmp_path, "SELECT rootpage FROM sqlite_master WHERE name = 'turns'")
    assert isinstance(root, int)
    with (tmp_path / EVENTS).open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(bytes(4096))
    with pytest.raises(CheckpointError, match=r"cannot be read.*malformed"):
        make(tmp_path)


@pytest.mark.parametrize(
    "change", ["blocks SET data = x'00'", "blocks SET digest = 'x'", "turns SET data = x'00'"]
)
def test_a_damaged_block_and_a_turn_damaged_before_it_was_packed_are_found(
    tmp_path: Path, change: str
) -> None:
    journal = make(tmp_path)
    write(journal, *range(1, 8))
    if change.startswith("turns"):
        ask(tmp_path, f"UPDATE {change} WHERE id = 3")
    write(journal, 8)
    journal.close()
    if change.startswith("blocks"):
        ask(tmp_path, f"UPDATE {change}")
    with pytest.raises(CheckpointError, match="block of commits up to 4 of the journal is damaged"):
        read_commits(tmp_path)


def test_a_journal_from_before_blocks_is_read_as_it_is_and_packed_when_it_goes_on(tmp_path: Path) -> None:
    journal = make(tmp_path, 1000)
    write(journal, *range(1, 21))
    journal.close()
    ask(tmp_path, "DROP TABLE blocks")
    ask(tmp_path, "PRAGMA user_version=2")
    assert [commit.number for commit in read_commits(tmp_path)] == list(range(1, 21))
    assert ask(tmp_path, "PRAGMA user_version") == [(2,)]
    again = make(tmp_path)
    write(again, 21, 22)
    again.close()
    assert ask(tmp_path, "PRAGMA user_version") == [(FORMAT,)]
    assert ask(tmp_path, "SELECT last FROM blocks") == [(4,), (8,)]
    assert [event for commit in read_commits(tmp_path) for event in commit.events] == events(*range(1, 23))
