"""One learner rank per process at a time: no test may leave its groups to the next."""

import os

import pytest

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch: Megatron would compile on the CPU


@pytest.fixture(autouse=True)
def leave_groups():
    """Also after a failed test, so that one failure does not become many."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        from learner.megatron.groups import stop_groups

        stop_groups()
