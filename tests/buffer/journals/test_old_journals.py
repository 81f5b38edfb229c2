"""Journals that an earlier version wrote: events with fewer fields than those of this one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.ledger import events as ev
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
