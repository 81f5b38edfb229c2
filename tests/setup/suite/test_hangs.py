"""A test that its own time limit cannot end ends `make test`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEAF = """
import signal, time

def test_it():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)
"""
HANGS_LATER = """
import threading, pytest

@pytest.fixture
def waits():
    over = threading.Event()
    yield
    over.wait(600)

def test_it(waits):
    assert False
"""


@pytest.mark.parametrize(
    ("body", "place"),
    [(DEAF, "line 6 in test_it"), pytest.param(HANGS_LATER, "line 8 in waits", marks=pytest.mark.long)],
    ids=["test", "teardown"],
)
def test_what_hangs_past_its_time_limit_ends_the_run_by_name(tmp_path: Path, body: str, place: str) -> None:
    (tmp_path / "test_it.py").write_text(body)
    # In these variables a make tells the one that it runs to print its folder.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    settings = ["HANGS_S=5", f"BIN={Path(sys.executable).parent}", "LIST=cpu", "ARGS="]
    command = ["make", "test", "-n", "-o", ".venv/.set-up-cpu", *settings]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    done = subprocess.run(
        [*shlex.split(said.stdout), "-n", "1", "--timeout", "2", "-p", "no:cacheprovider", "test_it.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        timeout=240,
    )
    assert done.returncode == 1
    assert "crashed while running 'test_it.py::test_it'" in done.stdout
    assert f'File "{tmp_path}/test_it.py", {place}' in done.stderr
