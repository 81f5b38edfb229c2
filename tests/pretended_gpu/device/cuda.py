"""Stand-ins for `torch.cuda` and for NCCL, for the whole life of a process that pretends to have one GPU.

Must be called before Megatron-core is imported, which binds functions for what it finds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor

from learner.attention import cascade_varlen, varlen
from learner.numerics import device
from tests.learner.attention import reference
from tests.pretended_gpu.device.streams import STREAMS, Seen
from tests.pretended_gpu.device.tensors import GPU, NCCL, note_wait, pin, unpin, within_kernel

VARLEN_CALLS: Counter[str] = Counter()
"""Calls of the stand-in for the variable-length kernel."""
MEMORY_SHARES: list[float] = []
"""Shares of the GPU's memory that the allocator was limited to."""


class Stream:
    """A stream: what it computes is there at once, what it copies once that is waited for."""

    _numbers = itertools.count()
    made: ClassVar[dict[int, Stream]] = {}
    """By their numbers; 0 is the default one."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device, self.cuda_stream = GPU, next(self._numbers)
        self.made[self.cuda_stream] = self

    def synchronize(self) -> None:
        note_wait()
        STREAMS.wait(STREAMS.now(self.cuda_stream))

    def wait_stream(self, other: Stream) -> None:
        STREAMS.order(self.cuda_stream, STREAMS.now(other.cuda_stream))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


DEFAULT = Stream()


class Event:
    """An event, which happens once the host waits for it; one that was never recorded has happened."""

    def __init__(self, *_: object, **__: object) -> None:
        self._seen: Seen = {}

    def record(self, stream: Stream | None = None) -> None:
        self._seen = STREAMS.now(STREAMS.current if stream is None else stream.cuda_stream)

    def synchronize(self) -> None:
        note_wait()
        STREAMS.wait(self._seen)

    def wait(self, stream: Stream | None = None) -> None:
        STREAMS.order(STREAMS.current if stream is None else stream.cuda_stream, self._seen)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Runtime:
    """The part of CUDA's runtime that pins memory which is there already."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:
        assert num_bytes > 0 and flags == 0
        pin(address)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        unpin(address)
        return 0


def _synchronize(*_: object) -> None:
    note_wait()
    STREAMS.wait()


def _on_gpu_where_asked(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        made = factory(*args, **options)
        return made if device is None else made.to(GPU if torch.device(device).type == "cuda" else device)

    return make


def _current_device() -> int | torch.device:
    """Return the number of the device; Megatron gives it to factories, which take none without a GPU."""
    caller = str(sys._getframe(1).f_globals.get("__name__", ""))
    return GPU if caller.startswith("megatron.") else 0


def _move_states(parameters: list[torch.Tensor], buffers: list[torch.Tensor], device: torch.device) -> None:
    """Stand for FSDP2's function, which sets `data` of tensors of the CPU."""
    for tensor in (*parameters, *buffers):
        if tensor.device.type == "cpu":
            there = tensor.detach().to(device)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(there) if is_parameter else there)


@functools.wraps(reference.varlen_attn)
def _attend(*args: Any, **options: Any) -> torch.Tensor:
    VARLEN_CALLS["forward"] += 1
    with within_kernel():
        return reference.varlen_attn(*args, **options)


def _counted(name: str) -> Any:
    def call(*args: Any) -> Any:
        VARLEN_CALLS[name] += 1
        with within_kernel():
            return getattr(reference, name)(*args)

    return call


def make_streams() -> dict[str, Any]:
    """Return the stand-ins for `torch.cuda`'s functions and classes about streams and copies, by name."""
    return {
        "synchronize": _synchronize,
        "cudart": lambda: Runtime,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream.made[STREAMS.current],
        "default_stream": lambda *_: DEFAULT,
        "stream": lambda stream: STREAMS.on(stream.cuda_stream),
    }


def install() -> None:
    """Have this process see one GPU of compute capability 9.0 with 80 GB."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the compiler would look for a GPU
    properties = torch._C._CudaDeviceProperties if hasattr(torch._C, "_CudaDeviceProperties") else object
    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": _current_device,
        "set_device": lambda _: None,
        "set_per_process_memory_fraction": lambda share, *_: MEMORY_SHARES.append(share),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "pretended",
        "get_device_properties": lambda *_: properties,
        **make_streams(),
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
    _fsdp_init._move_states_to_device = _move_states
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):  # C++ sees what is underneath
        setattr(DTensor, name, property(lambda self, name=name: getattr(self._local_tensor, name)))
    device.BACKENDS["cuda"] = "gloo"
    NCCL.append(True)
    distributed_c10d._get_object_coll_device = lambda _=None: GPU
    varlen.varlen_attn = _attend  # type: ignore[assignment]
    for name in ("flash", "flash_backward"):
        setattr(cascade_varlen, name, _counted(name))
