"""The staleness policies besides the default in a whole run, its journal verified afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.system.parts.up_run import UpRun, asyncrl_command

DEADLINE_S = 600.0
"""Of a start on a busy machine and eight steps."""
SETS = ("learner.steps=8", "staleness.max_lag=1", "eval.every_steps=0", "checkpoint.every_steps=4")


@pytest.mark.long
@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_a_run_trains_within_its_bound_and_its_journal_is_sound(
    up: Callable[..., UpRun], policy: str
) -> None:
    run = up(f"policy_{policy}", f"staleness.policy={policy}", *SETS)
    code, output = run.finish(DEADLINE_S)
    assert code == 0, output
    rows = run.rows()
    assert [row["training/global_step"] for row in rows] == list(range(1, 9))
    assert max(row["staleness/lag_max_trained"] for row in rows) <= 1
    assert run.summary()["ledger_residue"] == 0
    verdict = subprocess.run(
        asyncrl_command("verify", run.folder.name, "--dir", str(run.runs_dir)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert "residue 0" in verdict.stdout and "0 findings" in verdict.stdout
