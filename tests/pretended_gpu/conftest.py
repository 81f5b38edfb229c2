"""A pretended GPU in the test's own process, with streams whose copies happen late."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before torch: Megatron would compile on the CPU

import pytest
import torch

from tests.pretended_gpu.device import cuda
from tests.pretended_gpu.device.streams import STREAMS
from tests.pretended_gpu.device.tensors import WAITS, PretendedGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    for name, stand_in in cuda.make_streams().items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    WAITS.clear()
    with PretendedGpu():
        yield
    WAITS.clear()
    STREAMS.copies.clear()
