"""`make test-all`: a file at a time, and what passed is not run again until something changes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for
from tools import test_all

TEST = """
import pathlib, pytest

@pytest.mark.long
def test_one():
    place = pathlib.Path(__file__).with_suffix(".ran")
    place.write_text(place.read_text() + "x" if place.exists() else "x")
    assert {claim}

def test_short():
    assert False, "it is not long"
"""


def run_all(root: Path, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, "tools/test_all.py", *arguments]
    # Nine runs of pytest: with all plugins that are installed they take half a minute.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    found = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    return found.returncode, found.stdout.splitlines() + found.stderr.splitlines()


def commit(root: Path) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    subprocess.run([*git, "commit", "-qm", "all"], cwd=root, check=True)


@pytest.mark.long
def test_what_passed_is_left_out_until_the_repository_changes(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy("tools/test_all.py", tmp_path / "tools")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long: takes minutes\n")
    (tmp_path / ".gitignore").write_text("build/\n__pycache__/\n*.ran\n.pytest_cache/\n")
    (tmp_path / "test_good.py").write_text(TEST.format(claim=True))
    (tmp_path / "test_wrong.py").write_text(TEST.format(claim=False))
    (tmp_path / "test_none.py").write_text("def test_short(): assert False\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert run_all(tmp_path)[0] == 1, "nothing is committed"
    commit(tmp_path)
    code, lines = run_all(tmp_path)
    assert code == 1 and [line.split(":")[0] for line in lines[:2]] == [
        "[1/2] test_good.py",
        "[2/2] test_wrong.py",
    ]
    assert "passed" in lines[0] and "FAILED" in lines[1] and "1 failed: test_wrong.py" in lines[2]
    code, lines = run_all(tmp_path)
    assert code == 1 and "passed before" in lines[0]
    assert [(tmp_path / f"test_{name}.ran").read_text() for name in ("good", "wrong")] == ["x", "xx"]
    (tmp_path / "test_wrong.py").write_text(TEST.format(claim=True))
    assert run_all(tmp_path)[0] == 1, "what is not committed has no name"
    commit(tmp_path)
    code, lines = run_all(tmp_path)
    assert code == 0 and "before" not in lines[0], "another content: all is run again"
    assert run_all(tmp_path, "--again", "test_good.py")[0] == 0
    assert (tmp_path / "test_good.ran").read_text() == "xxx"


def test_a_part_that_is_ended_leaves_no_process_in_a_session_of_its_own() -> None:
    marked = os.environ | {test_all.SESSION_MARK: "of-this-test"}
    left = subprocess.Popen(["sleep", "600"], env=marked, start_new_session=True)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        wait_for(lambda: b"of-this-test" in Path(f"/proc/{left.pid}/environ").read_bytes(), "its exec to end")
        test_all.end_marked("of-this-test")
        assert left.wait(60.0) == -signal.SIGKILL
        assert other.poll() is None, "it is of another session"
    finally:
        for process in (left, other):
            process.kill()
            process.wait(60.0)
