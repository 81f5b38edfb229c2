"""A run whose replicas have different engines: vLLM and SGLang sample for one learner."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from asyncrl.cli.audit.report import verify_run
from asyncrl.control.machine.processes import pids_of_run
from rollout_service.engine.sglang.process import MODULE, PYTHON
from tests.system.parts.up_run import UpRun, leftovers

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not there: make setup LIST=sglang"),
]
GROUPS = 10
"""That each replica has generated before the run is ended."""


def sampled(status: dict[str, Any]) -> list[int]:
    services = status["services"]
    return [services.get(name, {}).get("trajectories") or 0 for name in ("rollout.0", "rollout.1")]


def test_replicas_of_two_engines_train_one_model(up: Callable[..., UpRun]) -> None:
    run = up(
        "mixed_engines",
        "rollout.engine=[vllm, sglang]",
        "rollout.engine_args={vllm: {max_num_batched_tokens: 9000}, sglang: {decode_log_interval: 41}}",
        "launcher.start_deadline_s=900",
        "learner.steps=100000",
        "eval.every_steps=0",
    )
    status = run.wait_for(lambda status: min(sampled(status)) >= 8 * GROUPS, 1000.0)
    run_id = json.loads((run.folder / "run.json").read_text())["run_id"]
    commands = [" ".join(psutil.Process(pid).cmdline()) for pid in pids_of_run(run_id)]
    assert sum(f"-m {MODULE}" in command for command in commands) == 1, commands
    begun = status["step"]
    run.wait_for(lambda status: status["step"] >= begun + 10)
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    assert verify_run(str(run.folder), "")["findings"] == []
    assert leftovers(run.folder) == []
    row = run.rows()[-1]
    gaps = [row[f"weights/probe_gap/{index}"] for index in (0, 1)]
    assert max(gaps) == row["weights/probe_gap_max"] < 1e-4 and min(gaps) >= 0.0
    assert row["staleness/lag_max_trained"] <= 4
