"""`learner.stream` in a whole run: it ends where the run that waits for whole batches ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.cli.audit.report import verify_run
from asyncrl.core.config.load import load_config
from tests.system.parts.harness import Harness
from tests.system.parts.up_run import QUICKSTART, UpRun, leftovers

SETTINGS = (
    "staleness.max_lag=0",
    "rollout.engine=scripted",
    "learner.steps=5",
    "learner.groups_per_step=8",
    "learner.minibatches=1",
    "eval.every_steps=0",
)


@pytest.mark.long
def test_at_max_lag_0_a_streamed_run_ends_with_the_weights_of_one_that_waits(
    up: Callable[..., UpRun],
) -> None:
    """Two ranks share each part; sums in another order leave little of what training changed."""
    runs, two_ranks = [], ("learner.dp=2", "learner.cpus=0.5")
    for name, changes in (("waiting", ()), ("streaming", ("learner.stream=true", *two_ranks))):
        runs.append(up(name, *SETTINGS, *changes))
        code, output = runs[-1].finish()
        assert code == 0, output
        assert runs[-1].summary()["ledger_residue"] == 0 and leftovers(runs[-1].folder) == []
    waiting, streaming = runs
    assert sum(row.get("stream/parts", 0.0) for row in streaming.rows()) > 0
    assert not any("stream/parts" in row for row in waiting.rows())
    weights, others = (load_file(run.folder / "weights" / "model.safetensors") for run in runs)
    for row, other in zip(waiting.rows(), streaming.rows(), strict=True):
        assert other["critic/rewards/mean"] == pytest.approx(row["critic/rewards/mean"], abs=1e-9)
        assert other["actor/grad_norm"] == pytest.approx(row["actor/grad_norm"], rel=1e-3)
    moved = sum(float((weights[name].double() - others[name].double()).square().sum()) for name in weights)
    size = sum(float(tensor.double().square().sum()) for tensor in weights.values())
    assert torch.tensor(moved / size).sqrt() < 1e-4


@pytest.mark.long
def test_killed_between_two_parts_the_learner_resumes_and_the_account_stays_exact(
    tmp_path: Path, digit_sort: Path
) -> None:
    values = [
        "run.name=parts",
        f"run.dir={tmp_path}",
        f"model.path={digit_sort}",
        f"data.train={digit_sort / 'train.parquet'}",
        "data.eval=null",
        "checkpoint.every_steps=2",
        *SETTINGS,
        "staleness.max_lag=1",
        "learner.stream=true",
    ]
    with Harness(load_config(QUICKSTART, values), tmp_path / "parts") as harness:
        for name in ("buffer.0", "weight_sync.0", "publisher.0", "receiver.0", "rollout.0"):
            harness.start(name)
        for _ in range(3):
            harness.start("learner.0", fault="learner.streamed")
            harness.await_kill("learner.0")
        harness.start("learner.0")
        harness.await_end("learner.0")
        status = harness.buffer_status()
        found = verify_run(str(harness.run_dir), "")
    assert status.residue == 0 and status.steps_trained == 5
    assert found["findings"] == []
