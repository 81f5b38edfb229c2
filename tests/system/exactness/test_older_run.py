"""A run that asyncrl made at f34ed81: its journal is verified, and it is resumed.

`run-f34ed81.tar.xz` was made by that version's `asyncrl up old.yaml`: ten steps of a model of 13,472
parameters, checkpoints of steps 8 and 10. It holds the configuration, the model and the run's folder, without
logs and pictures.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.system.parts.up_run import UP_DEADLINE_S, asyncrl_command

ARCHIVE = Path(__file__).parent / "run-f34ed81.tar.xz"
STEPS, MORE_STEPS = 10, 13
VERIFIED = "44 tickets, 40 trained in 10 steps, residue 0; largest lag trained 2, bound 2; 0 findings"
"""The last line of `verify` as f34ed81 printed it, behind the number of events."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the archive holds."""
    assert ARCHIVE.stat().st_size < 1 << 20
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        archive.extractall(tmp_path)
    return tmp_path


def ask(folder: Path, *words: str) -> str:
    """Return what a command prints; it must end with 0."""
    done = subprocess.run(
        asyncrl_command(*words), cwd=folder, capture_output=True, text=True, timeout=UP_DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_on_record(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "runs/older/metrics.jsonl").read_text().splitlines()]
    return [row["training/global_step"] for row in rows if "staleness/lag_max_trained" in row]


def test_the_journal_of_an_older_version_verifies_as_it_did(folder: Path) -> None:
    assert ask(folder, "verify", "older", "--dir", "runs").splitlines()[-1].endswith(VERIFIED)


@pytest.mark.long
def test_a_run_of_an_older_version_is_resumed_and_verifies(folder: Path) -> None:
    config = folder / "old.yaml"
    config.write_text(config.read_text().replace(f"steps: {STEPS}}}", f"steps: {MORE_STEPS}}}"))
    assert steps_on_record(folder) == list(range(1, STEPS + 1))
    ask(folder, "up", "old.yaml")
    assert steps_on_record(folder) == list(range(1, MORE_STEPS + 1))
    verified = ask(folder, "verify", "older", "--dir", "runs").splitlines()[-1]
    assert f"trained in {MORE_STEPS} steps, residue 0" in verified
    assert verified.endswith("0 findings")
