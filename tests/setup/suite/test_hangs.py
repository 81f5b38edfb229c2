"""A test that its own time limit cannot end ends `make test`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DEAF = """
import signal, time

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(600)
"""


def test_a_test_that_hangs_past_its_time_limit_ends_the_whole_by_name(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(DEAF)
    command = [
        "make",
        "test",
        "-n",
        "-o",
        ".venv/.set-up-cpu",
        "HANGS_S=5",
        f"BIN={Path(sys.executable).parent}",
    ]
    words = shlex.split(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    done = subprocess.run(
        [*words, "-n", "1", "--timeout", "1", "-p", "no:cacheprovider", "test_it.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 1
    assert "crashed while running 'test_it.py::test_deaf'" in done.stdout
    assert f'File "{tmp_path}/test_it.py", line 6 in test_deaf' in done.stderr
