"""The bounds of a version, against what a learner publishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.config.tree import Config
from asyncrl.core.staleness import PolicyVersion
from tests.learner.parts.training import open_backend, open_fsdp2
from weight_sync.bounds import SPARE, SPARE_BYTES, bounds_of
from weight_sync.memory.manifest import ANY_VERSION, Bucket, Manifest, TensorSpec, plan

BUCKET_BYTES = 1024


def config_of(folder: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "none"},
            "reward": {"fn": "digit_sort"},
            "weight_sync": {"bucket_bytes": BUCKET_BYTES},
        }
    )


@pytest.mark.parametrize("open_one", [open_backend, open_fsdp2], ids=["megatron", "fsdp2"])
def test_what_a_learner_publishes_is_within_the_bounds_of_its_model(model, open_one):
    bounds, backend = bounds_of(config_of(model)), open_one(model)
    specs = [
        TensorSpec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
        for name, one in backend.named_tensors()
    ]
    backend.close()
    layout = plan(specs, BUCKET_BYTES)
    buckets = (Bucket(BUCKET_BYTES, "0" * 32),) * layout.num_buckets
    data = Manifest(PolicyVersion(1 << 60, 1 << 60), layout, buckets).to_bytes()
    weights = bounds.total_bytes - SPARE_BYTES
    assert layout.total_bytes <= weights <= (SPARE + 1) * layout.total_bytes
    assert len(data) <= bounds.manifest_bytes - SPARE_BYTES


def test_a_model_whose_size_nobody_can_tell_has_the_bounds_of_any(tmp_path):
    assert bounds_of(config_of(tmp_path)) == ANY_VERSION
