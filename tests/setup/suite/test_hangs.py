"""A test that its own time limit cannot end ends `make test`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
DEAF = """
import signal, time

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)
"""


def test_a_test_that_hangs_past_its_time_limit_ends_the_whole_by_name(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(DEAF)
    # Of a `make test` that this is part of: its options, and its habit of naming the folder.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "test", "-n", "-o", ".venv/.set-up-cpu", "HANGS_S=5", "BIN=" + str(BIN)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    done = subprocess.run(
        [*shlex.split(said.stdout), "-n", "1", "--timeout", "1", "-p", "no:cacheprovider", "test_it.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 1
    assert "crashed while running 'test_it.py::test_deaf'" in done.stdout
    assert f'File "{tmp_path}/test_it.py", line 6 in test_deaf' in done.stderr
