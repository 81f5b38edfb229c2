"""The look at what tests leave behind finds it, with its test, and nothing of others."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

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
    assert f"process {process.pid} of tests/setup/test_leftovers.py::" in left
    assert session.look() == ([], [])


def test_a_new_file_is_found_unless_a_process_of_others_uses_it(tmp_path: Path) -> None:
    (tmp_path / "older").touch()
    session = Session("second", {tmp_path: {"older"}})
    assert session.look() == ([], [])
    newer, ours = tmp_path / uuid.uuid4().hex, tmp_path / f"asyncrl-{uuid.uuid4().hex}"
    for one in (newer, ours):
        one.touch()
    assert session.look() == ([str(ours)], [str(newer)])
    process = start(str(newer), str(ours), mark="theirs")
    assert session.look() == ([], []), "they are arguments of a process that is not ours"
    end(process)
    assert session.look() == ([str(ours)], [str(newer)])
