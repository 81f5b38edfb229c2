"""Stages of an engine's worker on a pretended GPU: what arrives there, and what its loader reads."""

from __future__ import annotations

import pytest
import torch

from tests.pretended_gpu.device.tensors import GPU, GpuTensor
from tests.pretended_gpu.nccl.members import make_gpu_parties
from tests.weight_sync.direct.members import RUNTIME, make_checkpoint, random_regions
from weight_sync.direct.stage import NUM_STAGES, SPARE_BYTES, Stages, find_room
from weight_sync.direct.transports.choice import HOST
from weight_sync.memory.manifest import TensorSpec, plan


def test_a_stage_that_came_over_nccl_is_loaded_from_the_gpu(meet):
    parties, _ = make_gpu_parties([])
    stages = [Stages(random_regions(seed), RUNTIME) for seed in (4, 5)]
    for one in stages:
        one.device = GPU
    assert meet([*parties, *stages]).run(1) == [None] * 6
    full = make_checkpoint(1)
    layout = plan([TensorSpec(name, "float32", tuple(one.shape)) for name, one in full.items()], 1 << 20)
    for one in stages:
        found = dict(one.tensors(1, layout))
        assert all(isinstance(tensor, GpuTensor) for tensor in found.values())
        assert {name: tensor.shape for name, tensor in found.items()} == {
            name: tensor.shape for name, tensor in full.items()
        }
        for name, rectangle in one.regions:
            assert torch.equal(found[name].cpu()[rectangle.slices], full[name][rectangle.slices])
        assert one.regions


@pytest.mark.parametrize("lacking", [0, 1])
def test_stages_are_on_the_gpu_if_all_that_they_need_is_free_there(gpu, monkeypatch, caplog, lacking):
    caplog.set_level("INFO")
    full = make_checkpoint(1)
    regions = random_regions(4)
    stage_bytes = sum(rectangle.num_elements * 4 for _, rectangle in regions)
    needed = NUM_STAGES * stage_bytes + max(one.nbytes for one in full.values()) + SPARE_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed - lacking, 80 << 30))
    assert find_room(GPU, regions, full.items()) == (HOST if lacking else GPU)
    assert ("new weights arrive in host memory" in caplog.text) == bool(lacking)
    assert find_room(HOST, regions, full.items()) == HOST
