"""Starts learner ranks in processes of their own and compares what they trained with one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.control.launch.ports import HeldPort
from learner.backend import Placement
from tests.learner.parts.rank_process import RUNS

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 300.0


def run_ranks(world_size: int, jobs: list[dict[str, Any]], out: Path) -> Path:
    """Run `jobs` one after another in `world_size` processes; return `out`, where the results are."""
    ports = [HeldPort() for _ in jobs]
    jobs = [job | {"port": port.number} for job, port in zip(jobs, ports, strict=True)]
    table = out / "jobs.json"
    table.write_text(json.dumps(jobs, default=str))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.learner.parts.rank_process"]
    logs = [(out / f"rank.{rank}.log").open("w+") for rank in range(world_size)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(table), str(out)],
            cwd=ROOT,
            env=environment,
            stderr=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in processes]
        errors = "\n".join(Path(log.name).read_text()[-3000:] for log in logs)
        assert codes == [0] * world_size, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for held in (*logs, *ports):
            held.close()
    return out


def run_alone(model: Path, out: Path, kind: str = "plain") -> dict[str, Any]:
    """Do in this process, as a single rank, what ranks do together; return its result."""
    return RUNS[kind](Placement(), {"name": "alone", "model": model, "changes": {}}, out)


def assert_trained_alike(out: Path, name: str, world_size: int, alone: dict[str, Any], folder: Path) -> None:
    """Every rank reports the metrics and log-probs of one process, and exports its weights."""
    results = [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(world_size)]
    for found in results:
        assert len(found["metrics"]) == len(alone["metrics"]) == 6
        for ours, reference in zip(found["metrics"], alone["metrics"], strict=True):
            assert ours == pytest.approx(reference, abs=1e-5)
        for column in ("logprobs", "entropy", "squares", "values"):
            if column in alone:
                torch.testing.assert_close(
                    torch.tensor(found[column]), torch.tensor(alone[column]), rtol=0, atol=1e-4
                )
        assert found.get("exported") == results[0].get("exported")
    exported, weights = (load_file(at / "model.safetensors") for at in (out / name, folder / "alone"))
    assert exported.keys() == weights.keys()
    for tensor_name, tensor in exported.items():
        torch.testing.assert_close(tensor, weights[tensor_name], rtol=0, atol=1e-4)
