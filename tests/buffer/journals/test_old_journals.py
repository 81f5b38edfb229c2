"""Journals of other versions: older ones are read and brought up to date, newer ones left alone."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.buffer.journals.event_database import EVENTS, FORMAT, read_commits
from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.journals.redis.past import keys_of
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.ledger import events as ev
from asyncrl.core.errors import ConfigError
from tests.buffer.journals.journal_parts import raw_link
from tests.buffer.journals.redis.redis_parts import read_run
from tests.buffer.parts import make_store


class Resumed(NamedTuple):
    """As it was before a resume could fork or leave a note."""

    token: int
    step: int


HISTORY = [
    ev.DataDescribed(100, "digest"),
    ev.Opened(1, "learner"),
    ev.VersionRegistered(1, 0),
    ev.Opened(2, "learner"),
]


def write(folder: Path, last: NamedTuple) -> Path:
    with contextlib.closing(FileJournal(folder, "never")) as journal:
        journal.commit([*HISTORY, last], 0.0)  # the store reads it below
    return folder


def test_a_resume_without_fork_and_note_is_one_that_changed_nothing(tmp_path):
    old, plain = write(tmp_path / "old", Resumed(2, 0)), write(tmp_path / "new", ev.Resumed(2, 0))
    states = []
    for folder in (old, plain):
        store = make_store(folder)
        states.append(store.ledger.state.as_values())
        store.journal.close()
    assert states[0] == states[1]
    assert states[0]["is_resumed"] and states[0]["note"] == {}


def test_an_old_resume_is_read_as_this_version_writes_it():
    assert ev.unpack(["Resumed", 2, 0]) == ev.Resumed(2, 0, is_fork=False, note=())


STORED = Path(__file__).parent / "stored"
"""`events_1.sql` is the database of a journal before formats had a number, as SQL."""


def restore(folder: Path) -> Path:
    with contextlib.closing(sqlite3.connect(folder / EVENTS)) as database:
        database.executescript((STORED / "events_1.sql").read_text())
    return folder


def ask(folder: Path, query: str) -> list:
    with contextlib.closing(sqlite3.connect(folder / EVENTS)) as database:
        return database.execute(query).fetchall()


def test_a_journal_without_a_number_is_brought_up_to_date_and_goes_on(tmp_path):
    with contextlib.closing(FileJournal(restore(tmp_path), "never")) as journal:
        before = list(journal.events())
        assert before == [*HISTORY[:3]]
        journal.commit([HISTORY[3]], 0.0)
        assert [commit.time_s is None for commit in journal.commits()] == [True, True, False]
    assert ask(tmp_path, "PRAGMA user_version") == [(FORMAT,)]
    with contextlib.closing(FileJournal(tmp_path, "never")) as journal:
        assert list(journal.events()) == [*before, HISTORY[3]]


def test_who_only_reads_an_older_journal_leaves_it_as_it_is(tmp_path):
    commits = read_commits(restore(tmp_path))
    assert [event for commit in commits for event in commit.events] == [*HISTORY[:3]]
    assert ask(tmp_path, "PRAGMA user_version") == [(0,)]
    assert "time_s" not in {row[1] for row in ask(tmp_path, "PRAGMA table_info(turns)")}


def test_a_journal_of_a_newer_version_is_refused_and_not_touched(tmp_path):
    ask(restore(tmp_path), f"PRAGMA user_version={FORMAT + 1}")
    before = (tmp_path / EVENTS).read_bytes()
    for open_it in (lambda: FileJournal(tmp_path), lambda: read_commits(tmp_path)):
        with pytest.raises(ConfigError, match=r"is of format 4, this asyncrl reads up to 3. A newer asyncrl"):
            open_it()
    assert (tmp_path / EVENTS).read_bytes() == before


def test_a_journal_in_redis_without_a_number_gets_one_and_a_newer_one_is_left_alone(own_redis: RedisServer):
    keys = keys_of("formats")
    with contextlib.closing(RedisJournal(lambda: own_redis.url, "formats")) as journal:
        journal.commit([HISTORY[1]], 0.0)
        journal.tick(0.0)
    with raw_link(own_redis.url) as link:
        assert link.call("DEL", keys["format"]) == 1  # as it was before there was one
    with contextlib.closing(RedisJournal(lambda: own_redis.url, "formats")) as journal:
        assert list(journal.recover().events) == [HISTORY[1]]
    with raw_link(own_redis.url) as link:
        assert link.call("GET", keys["format"]) == b"2"
        link.call("SET", keys["format"], "3")
        owner = link.call("GET", keys["owner"])
        for open_it in (
            lambda: RedisJournal(lambda: own_redis.url, "formats"),
            lambda: read_run(own_redis.url, "formats"),
        ):
            with pytest.raises(ConfigError, match=r"is of format 3, this asyncrl reads up to 2. A newer"):
                open_it()
        assert link.call("GET", keys["owner"]) == owner
