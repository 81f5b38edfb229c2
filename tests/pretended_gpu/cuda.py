"""Stand-ins for `torch.cuda` and for NCCL, for the whole life of a process that pretends to have one GPU.

Must be called before Megatron-core is imported, which binds functions for what it finds.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from learner.attention import varlen
from learner.numerics import device
from tests.learner.attention import reference
from tests.pretended_gpu.tensors import GPU, finish_copies, note_wait, within_kernel

VARLEN_CALLS: Counter[str] = Counter()
"""Calls of the stand-in for the variable-length kernel."""
MEMORY_SHARES: list[float] = []
"""Shares of the GPU's memory that the allocator was limited to."""


class Stream:
    """A stream: what it computes is there at once, what it copies to the host once that is waited for."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device, self.cuda_stream = GPU, 0

    def synchronize(self) -> None:
        _synchronize()

    def wait_stream(self, _: Stream) -> None:
        pass

    def wait_event(self, _: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """An event, which happens once the host waits for it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, _: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        _synchronize()

    def wait(self, _: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 0.0


def _synchronize(*_: object) -> None:
    note_wait()
    finish_copies()


def _on_gpu_where_asked(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        made = factory(*args, **options)
        return made if device is None else made.to(GPU if torch.device(device).type == "cuda" else device)

    return make


@functools.wraps(reference.varlen_attn)
def _attend(*args: Any, **options: Any) -> torch.Tensor:
    VARLEN_CALLS["forward"] += 1
    with within_kernel():
        return reference.varlen_attn(*args, **options)


def install() -> None:
    """Have this process see one GPU of compute capability 9.0 with 80 GB."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the compiler would look for a GPU
    stream = Stream()
    properties = torch._C._CudaDeviceProperties if hasattr(torch._C, "_CudaDeviceProperties") else object
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: GPU,  # a number: PyTorch takes none for a device without an accelerator
        "set_device": lambda _: None,
        "set_per_process_memory_fraction": lambda share, *_: MEMORY_SHARES.append(share),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "pretended",
        "get_device_properties": lambda *_: properties,
        "synchronize": _synchronize,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "mem_get_info": lambda *_: (80 << 30, 80 << 30),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": lambda _: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "device": lambda _: contextlib.nullcontext(),
        "default_generators": {GPU: torch.default_generator},
    }
    for name, value in names.items():
        setattr(torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state"):  # which recomputation calls by their module
        setattr(torch.cuda.random, name, names[name])
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    for name in ("tensor", "as_tensor", "from_numpy"):  # their C++ asks for a driver before any mode is asked
        setattr(torch, name, _on_gpu_where_asked(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **options: self.to(GPU, **options)  # type: ignore[method-assign]
    device.BACKENDS["cuda"] = "gloo"
    varlen.varlen_attn = _attend  # type: ignore[assignment]
