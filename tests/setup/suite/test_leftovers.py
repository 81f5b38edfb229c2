"""The look at what tests leave behind finds it, with its test, and nothing of others."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests import leftovers
from tests.leftovers import MARK, Session

WAITS = "import sys; sys.stdin.read()"


def start(*command: str, mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", WAITS, *command], env={**os.environ, MARK: mark}, stdin=subprocess.PIPE
    )


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate(timeout=30)


def test_a_process_is_found_by_its_mark_and_told_with_its_test() -> None:
    session = Session("first", {})
    assert session.look() == ([], [])
    process = start(mark="first")
    ((left,), _) = session.look()
    end(process)
    assert f"process {process.pid} of tests/setup/suite/test_leftovers.py::" in left
    assert session.look() == ([], [])


def test_a_new_file_is_found_unless_a_process_of_others_uses_it(tmp_path: Path) -> None:
    (tmp_path / "older").touch()
    session = Session(os.environ[MARK], {tmp_path: {"older"}})
    newer = tmp_path / uuid.uuid4().hex
    newer.touch()
    assert session.look()[1] == [str(newer)]
    process = start(str(newer), mark="theirs")
    assert str(newer) not in session.look()[1], "it is an argument of a process that is not ours"
    end(process)


def test_what_bears_the_projects_name_is_ours_while_no_other_session_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / f"asyncrl-{uuid.uuid4().hex}"
    ours.touch()
    session = Session(os.environ[MARK], {tmp_path: set()})
    for is_alone in (True, False):
        monkeypatch.setattr(leftovers, "_is_alone", lambda _, found=is_alone: found)
        assert (str(ours) in session.look()[0]) is is_alone
        assert (str(ours) in session.look()[1]) is not is_alone
    monkeypatch.undo()
    process = start(mark="theirs")
    assert str(ours) in session.look()[1]
    end(process)
