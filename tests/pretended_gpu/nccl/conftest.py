"""The stand-in for NCCL in place of torch's, within the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed import distributed_c10d

from asyncrl.core.runtime.faults import set_hook
from tests.pretended_gpu.device.nccl import PretendedNccl, properties_of
from tests.pretended_gpu.device.streams import STREAMS
from tests.pretended_gpu.nccl.members import GpuMembers
from weight_sync.direct.transports import choice
from weight_sync.direct.transports import nccl as transport


@pytest.fixture
def nccl(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PretendedNccl]]:
    """Return the ranks that the test makes."""
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", PretendedNccl, raising=False)
    monkeypatch.setattr(transport, "POLL_S", 0.003)  # many threads share a processor
    monkeypatch.setattr(choice, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    PretendedNccl.made.clear()
    yield PretendedNccl.made
    STREAMS.current = 0


@pytest.fixture
def meet(nccl: list[PretendedNccl]) -> Iterator[Callable[..., GpuMembers]]:
    met: list[GpuMembers] = []

    def make(*args: object, **kwargs: object) -> GpuMembers:
        met.append(GpuMembers(*args, **kwargs))  # type: ignore[arg-type]
        return met[-1]

    yield make
    set_hook(None)
    for members in met:
        members.close()
