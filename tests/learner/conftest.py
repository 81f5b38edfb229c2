"""One learner rank per process at a time: no test may leave its groups to the next."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.weight_sync.cluster import Cluster

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch: Megatron would compile on the CPU


MANY_DESCRIPTORS = 512  # a model's groups hold 64, in cycles: without this, hundreds of tests hold 2,000


@pytest.fixture(autouse=True)
def leave_groups():
    """Also after a failed test, so that one failure does not become many."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        from learner.megatron.groups import stop_groups

        stop_groups()
    if len(os.listdir("/proc/self/fd")) > MANY_DESCRIPTORS:
        gc.collect()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, which no test may change."""
    from tests.learner.parts.samples import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Weight-sync services, to which the learner of a test publishes."""
    from tests.weight_sync.cluster import running_cluster

    with running_cluster() as started:
        yield started
