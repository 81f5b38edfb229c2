"""A whole run, `asyncrl up`, with a learning rate that is a hundred times too high."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_learning_rate_a_hundred_times_too_high_is_caught_rolled_back_and_explained(tmp_path):
    changes = [
        "run.name=hot",
        f"run.dir={tmp_path}",
        "data.eval=null",
        "eval.every_steps=0",
        "rollout.replicas=1",
        "learner.lr=2e-2",
        "learner.steps=60",
        "checkpoint.every_steps=5",
        "guard.action=rollback",
    ]
    sets = [part for change in changes for part in ("--set", change)]
    command = [sys.executable, "-m", "asyncrl.cli", "up", str(QUICKSTART), *sets]
    found = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    text = (tmp_path / "hot" / "logs" / "learner.0.log").read_text()
    outcome = json.loads((tmp_path / "hot" / "outcome.json").read_text())
    assert "back to the checkpoint of step" in text and "with 0.5 of the configured learning rate" in text
    for part in ("what happened", "likely causes, in order", "learner.lr is too high", "what to change"):
        assert part in text
    lines = (tmp_path / "hot" / "metrics.jsonl").read_text().splitlines()
    rows = [row for line in lines if "guard/kl_spike" in (row := json.loads(line))]
    assert rows[-1]["guard/large_steps"] >= 1
    residues = [row["buffer/residue"] for row in rows if "buffer/residue" in row]
    assert residues and not any(residues)
    if found.returncode:  # a quarter of it is still too high: it says so and ends
        assert outcome["state"] == "failed" and "the guard stopped the run" in outcome["error"]
