"""A mixture of experts on the pretended GPU: its optimizer on either side, and its routers replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.learner.parts.samples import save_model
from tests.pretended_gpu.learner.steps import (
    assert_updates_alike,
    assert_weights_alike,
    result,
    run,
    run_on_gpu,
)
from tests.pretended_gpu.learner.test_offload import assert_same

pytestmark = pytest.mark.long  # 90 s each: four learners
RATE = "actor/router_flip_rate"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What learners compute; under `model` their mixture. FSDP2's experts need CUDA's own grouped product."""
    folder = tmp_path_factory.mktemp("experts")
    save_model(folder / "model", "qwen3_moe")
    run_on_gpu(
        folder,
        folder / "model",
        ["float32:replay", "float32:replay:offload"],
    )
    return folder


def test_experts_train_with_their_optimizer_on_the_host_as_on_the_gpu(folder: Path) -> None:
    plain, moved = (result(folder, way) for way in ("float32:replay", "float32:replay:offload"))
    assert_same(moved, plain, "rolled back", "resumed")
    assert any(".experts." in name for name in plain["exported"])


def test_recorded_experts_are_taken_on_the_gpu_as_on_the_cpu(folder: Path) -> None:
    ours, wanted = (
        result(folder, "float32:replay"),
        run(folder / "model", "float32:replay", folder / "cpu", 0),
    )
    for one, other in zip(ours["replayed logprobs"], wanted["replayed logprobs"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert (ours["replayed logprobs"][0] - ours["logprobs"][0]).abs().max() > 0.05
    (replayed, *others), (on_cpu, *_) = ours["metrics"], wanted["metrics"]
    assert 0.5 < replayed[RATE] == pytest.approx(on_cpu[RATE], abs=1e-6)
    assert not any(RATE in one for one in others)
    assert_updates_alike(ours["metrics"], wanted["metrics"], TOLERANCE)
    assert_weights_alike(ours["exported"], wanted["exported"], TOLERANCE)
