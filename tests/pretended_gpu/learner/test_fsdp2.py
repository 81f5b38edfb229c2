"""FSDP2's whole step on the pretended GPU: no operation mixes devices, and where the host waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.learner.parts.samples import save_model
from tests.pretended_gpu.learner.steps import (
    assert_is_published,
    assert_updates_alike,
    assert_weights_alike,
    result,
    run,
    run_on_gpu,
)

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
BACKWARD = "learner/fsdp2/engine.py"
ONCE = "bfloat16:fsdp2:once"


def num_waits(found: dict[str, Any], of: str) -> int:
    total: int = sum(found[f"waits of {of}"].values())
    return total


@pytest.mark.long  # 60 s for each: four learners
@pytest.mark.parametrize("kind", ["qwen3", "qwen2_tied", "llama_stretched"])
def test_a_learner_trains_goes_back_resumes_and_exports_as_on_the_cpu_with_weights_on_either_side(
    tmp_path: Path, kind: str
) -> None:
    """Weights on the host: to the bit; FSDP2 waits then for each gradient of each microbatch."""
    model = save_model(tmp_path / "model", kind)
    run_on_gpu(tmp_path, model, [f"{dtype}:fsdp2{more}" for dtype in TOLERANCE for more in ("", ":offload")])
    for dtype, tolerance in TOLERANCE.items():
        found, offloaded = result(tmp_path, f"{dtype}:fsdp2"), result(tmp_path, f"{dtype}:fsdp2:offload")
        assert (found["device"], offloaded["device"]) == ("cuda:0", "cpu")
        on_cpu = run(model, f"{dtype}:fsdp2", tmp_path / "cpu" / dtype, 0)
        for one, other in zip(found["logprobs"], on_cpu["logprobs"], strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=0.0)
        for part in ("metrics", "rolled back", "resumed"):
            assert_updates_alike(found[part], on_cpu[part], tolerance)
        assert_weights_alike(found["exported"], on_cpu["exported"], tolerance)
        assert found["rolled back"] == found["resumed"]
        assert_is_published(found)
        for part in ("metrics", "rolled back", "resumed"):
            assert offloaded[part] == found[part]
        assert all(torch.equal(one, found["exported"][name]) for name, one in offloaded["exported"].items())
        assert torch.equal(offloaded["published"]["bytes"], found["published"]["bytes"])
        waits = {line: num for line, num in offloaded["waits of a step"].items() if BACKWARD in line}
        assert num_waits(found, "a step") <= 3 and num_waits(found, "gradients") <= 1
        assert max(waits.values()) == found["microbatches"] * found["parameters"]
        assert num_waits(offloaded, "a step") - max(waits.values()) <= 3


@pytest.mark.long  # 30 s: two ranks, each with a pretended GPU
def test_two_ranks_wait_once_more_in_each_pass_for_the_number_of_microbatches(tmp_path: Path) -> None:
    """NCCL takes no tensor of the CPU."""
    run_on_gpu(tmp_path, save_model(tmp_path / "model"), [ONCE], num_ranks=2)
    ranks = [result(tmp_path, ONCE, rank) for rank in (0, 1)]
    assert all(torch.equal(one, ranks[1]["exported"][name]) for name, one in ranks[0]["exported"].items())
    for found in ranks:
        assert num_waits(found, "gradients") <= 2 and num_waits(found, "a step") <= 5
