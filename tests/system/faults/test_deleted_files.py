"""The data and the reward of a live run are deleted: it trains on, and who needs them next names them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.parts.up_run import UpRun, leftovers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
QUICK = ("rollout.engine=scripted", "eval.every_steps=0", "data.eval=null", "checkpoint.every_steps=5")
PATIENCE_S = 500.0
REWARD = """
def score(response, ground_truth):
    return float(response.strip() == ground_truth)
"""
SAID = {"reward.py": "the reward file {path} does not exist", "train.parquet": "{path} does not exist"}
REFUSED = {
    "reward.py": "reward.fn: there is no file '{path}'",
    "train.parquet": "data.train: {path} does not exist",
}


@pytest.fixture
def task(tmp_path: Path, digit_sort: Path) -> tuple[str, str]:
    """Write a reward and data of a user's own; return the keys that name them."""
    (tmp_path / "reward.py").write_text(REWARD)
    shutil.copy(digit_sort / "train.parquet", tmp_path)
    return f"reward.fn={tmp_path / 'reward.py'}:score", f"data.train={tmp_path / 'train.parquet'}"


@pytest.mark.parametrize("name", SAID)
def test_a_run_trains_on_without_a_file_until_a_new_replica_names_it_and_resumes_with_it(
    up: Callable[..., UpRun], task: tuple[str, str], tmp_path: Path, name: str
) -> None:
    path, of_run = tmp_path / name, f"without-{name.partition('.')[0]}"
    run = up(of_run, *QUICK, *task, "learner.steps=1000000")
    run.wait_for(lambda status: status["step"] >= 3, PATIENCE_S)
    aside = path.rename(tmp_path / "aside")
    step = run.status()["step"]
    status = run.wait_for(lambda status: status["step"] >= step + 20 and not status["obstacles"], PATIENCE_S)
    os.kill(status["services"]["rollout.0"]["pid"], signal.SIGKILL)
    code, output = run.finish(PATIENCE_S)
    said = SAID[name].format(path=path)
    assert code == 1 and f"the run failed in rollout.0: ConfigError: {said}" in output, output
    assert "residue 0" in output and leftovers(run.folder) == []
    code, output = up(of_run, *QUICK, *task, "learner.steps=1000000").finish(PATIENCE_S)
    assert code == 2 and REFUSED[name].format(path=path) in output, "before anything is started"
    aside.rename(path)
    steps = run.rows()[-1]["training/global_step"] + 5
    last = up(of_run, *QUICK, *task, f"learner.steps={steps}")
    code, output = last.finish(PATIENCE_S)
    assert code == 0, output
    assert last.summary()["ledger_residue"] == 0 and last.rows()[-1]["training/global_step"] == steps
