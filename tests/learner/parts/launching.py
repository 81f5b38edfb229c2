"""Starts learner ranks in processes of their own and compares what they trained with one process."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.control.machine.ports import held_row
from asyncrl.core.files.private import make_secret
from learner.backend import Placement
from tests import leftovers
from tests.learner.parts.rank_process import RUNS

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 300.0


class RankServer:
    """The process that learner ranks are forked from.

    Example:
        server = RankServer()
        codes = server.run({"world_size": 2, "jobs": jobs, "out": folder})
        server.close()
    """

    def __init__(self) -> None:
        # NVML tells whether there is a GPU without a CUDA context, which would not survive a fork.
        changes = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.learner.parts.rank_process"],
            cwd=ROOT,
            env=os.environ | changes,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, request: dict[str, Any]) -> list[int]:
        """Return the exit codes of the ranks; fail if they take too long, or the server has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        waiting = select.poll()  # select() takes no descriptor above 1023
        waiting.register(self._process.stdout, select.POLLIN)
        answer = self._process.stdout.readline() if waiting.poll(DEADLINE_S * 1000) else ""
        if not answer:
            start_server.cache_clear()
            self.close()
            pytest.fail(f"the ranks have not ended in {DEADLINE_S:g} s, or their server has")
        return list(json.loads(answer))

    def close(self) -> None:
        """End the server, and with it ranks that hang."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@functools.cache
def start_server() -> RankServer:
    """Return the one server of all tests: a rank of its own process imports for six seconds."""
    server = RankServer()
    leftovers.at_end.callback(server.close)
    return server


def run_ranks(
    world_size: int, jobs: list[dict[str, Any]], out: Path, wanted_codes: Sequence[int] = ()
) -> Path:
    """Run `jobs` one after another in `world_size` processes; return `out`, where the results are.

    All must end well, or with `wanted_codes`.
    """
    with held_row("127.0.0.1", len(jobs)) as first:  # below the ports that outgoing connections take
        secret = make_secret()
        placed = [job | {"port": first + index, "secret": secret} for index, job in enumerate(jobs)]
        codes = start_server().run({"world_size": world_size, "jobs": placed, "out": out})
    logs = (out / f"rank.{rank}.log" for rank in range(world_size))
    assert codes == list(wanted_codes or [0] * world_size), "\n".join(log.read_text()[-3000:] for log in logs)
    return out


def run_alone(model: Path, out: Path, kind: str = "plain", **job: Any) -> dict[str, Any]:
    """Do in this process, as a single rank, what ranks do together; return its result."""
    return RUNS[kind](Placement(), {"name": "alone", "model": model, "changes": {}} | job, out)


def assert_trained_alike(
    out: Path, name: str, world_size: int, alone: dict[str, Any], folder: Path, tolerance: float = 1e-5
) -> None:
    """Every rank reports metrics (to `tolerance`) and log-probs of one process, and exports its weights."""
    results = [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(world_size)]
    for found in results:
        assert len(found["metrics"]) == len(alone["metrics"]) == 6
        for ours, reference in zip(found["metrics"], alone["metrics"], strict=True):
            assert ours == pytest.approx(reference, abs=tolerance)
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
