"""A process forked from the forkserver: what it has imported, and in which environment it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_a_child_has_vllm_imported_and_its_starter_s_environment() -> None:
    # In a process of its own: a process has one fork server, and other tests may have begun it.
    done = subprocess.run(
        [sys.executable, "-m", "tests.rollout.forkserver_process"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "late": "after the fork server had begun",
        "has_vllm": True,
        "num_threads": "1",
        "is_frozen": True,
        "exitcode": 0,
    }
