"""Each preset's learner computes on the pretended GPU what it computes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.core.config.gpus import memory_share
from tests.learner.parts.samples import save_model
from tests.pretended_gpu.learner.preset_learners import learners, run

ROOT = Path(__file__).parents[3]
TOLERANCE = 0.1
LEARNERS = learners()
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a process with a pretended GPU has left a model, and what each learner computed with it."""
    folder = tmp_path_factory.mktemp("presets")
    command = [sys.executable, "-m", "tests.pretended_gpu.learner.preset_learners"]
    command += [str(save_model(folder / "model")), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400.0, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.parametrize("name", LEARNERS)
def test_the_learner_of_a_preset_computes_on_a_gpu_what_it_computes_on_the_cpu(
    name: str, folder: Path
) -> None:
    (section, dtype), index = LEARNERS[name], list(LEARNERS).index(name)
    found: dict[str, Any] = torch.load(folder / f"{index}.pt")
    on_cpu = run(folder / "model", section.model_copy(update={"gpus": 0.0}), dtype)
    assert (found["device"], on_cpu["device"], dtype) == ("cuda:0", "cpu", "bfloat16")
    assert found["varlen calls"] > 0, "the kernel of a GPU"
    share = memory_share(section.gpus)
    assert found["shares"] == ([] if share is None else [share])
    for ours, wanted in zip(found["logprobs"], on_cpu["logprobs"], strict=True):
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE, rtol=0.0)
    assert len(found["metrics"]) == section.minibatches
    for metrics, wanted in zip(found["metrics"], on_cpu["metrics"], strict=True):
        assert metrics == pytest.approx(wanted, abs=TOLERANCE, rel=TOLERANCE)
        assert metrics["actor/grad_norm"] > 0
    for weight, tensor in found["exported"].items():
        torch.testing.assert_close(tensor, on_cpu["exported"][weight], atol=0.05 * TOLERANCE, rtol=0.01)


def test_the_presets_differ_in_what_their_learners_do() -> None:
    sections = [section for section, _ in LEARNERS.values()]
    assert {section.gpus for section in sections} == {0.5, 1.0}
    assert {section.recompute for section in sections} == {"none", "full"}
    assert {section.overlap for section in sections} == {False, True}
