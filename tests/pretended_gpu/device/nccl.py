"""Stand-in for `ProcessGroupNCCL` between threads, each of which pretends to have a GPU of its own.

It has the rules of the library and no more: one rank on each GPU; tensors of the GPU alone; the n-th send of
a pair meets its n-th receive, of as many bytes; a group of calls holds up those after it on its communicator;
a message that nobody takes is never done, and no wait ends it; after an abort what was under way looks done,
whatever has arrived, and every call fails; the other ranks are told nothing. Bytes are read and written as
late as the library may. Who breaks a rule gets `RuleBroken`, which no code catches.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.pretended_gpu.device.tensors import GpuTensor

WAIT_S = 60.0
NONSENSE = 0xA5
_here = threading.local()


class RuleBroken(BaseException):
    """A call that the library would answer with a hang, with wrong bytes, or with the end of the process."""


def take_gpu(name: str) -> None:
    """Have this thread have the GPU of this name."""
    _here.gpu = name


def properties_of(_: object = None) -> Any:
    """Stand for `torch.cuda.get_device_properties`."""
    return SimpleNamespace(uuid=_here.gpu)


@dataclass
class _Call:
    values_B: torch.Tensor
    other: int
    is_sent: bool
    is_done: bool = False


@dataclass(eq=False)
class Work:
    """A group of calls under way."""

    communicator: _Communicator
    rank: int
    calls: list[_Call]

    def is_completed(self) -> bool:
        with self.communicator.lock:
            self.communicator.progress()
            return self.rank in self.communicator.aborted or all(call.is_done for call in self.calls)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait, not the host: as the library, whatever the timeout says."""
        return True


@dataclass(eq=False)
class _Communicator:
    lock: threading.Condition = field(default_factory=threading.Condition)
    gpus: dict[int, str] = field(default_factory=dict)
    streams: dict[int, deque[Work]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)

    def progress(self) -> None:
        """Move what can move: only the first group of each rank's stream runs."""
        while any(self._move(rank) for rank in self.streams):
            pass

    def _move(self, rank: int) -> bool:
        stream, has_moved = self.streams[rank], False
        for call in list(stream[0].calls) if stream else []:
            taken = self._find_receive(rank, call.other) if self._is_first(rank, call) else None
            if taken is None:
                continue
            if taken.values_B.numel() != call.values_B.numel():
                raise RuleBroken(f"{rank} sends other than as many bytes as {call.other} receives")
            taken.values_B.copy_(call.values_B)
            taken.is_done = call.is_done = has_moved = True
        for others in self.streams.values():
            while others and all(call.is_done for call in others[0].calls):
                others.popleft()
        return has_moved

    def _is_first(self, rank: int, call: _Call) -> bool:
        calls = self.streams[rank][0].calls if self.streams[rank] else []
        same = [one for one in calls if one.is_sent and one.other == call.other and not one.is_done]
        return bool(same) and same[0] is call

    def _find_receive(self, rank: int, other: int) -> _Call | None:
        stream = self.streams[other]
        calls = stream[0].calls if stream else []
        return next((one for one in calls if not (one.is_sent or one.is_done) and one.other == rank), None)


class PretendedNccl:
    """See the module. One instance is one rank."""

    class Options:
        def __init__(self) -> None:
            self._timeout = timedelta(minutes=10)
            self.config = SimpleNamespace(blocking=None, max_ctas=None)

    made: ClassVar[list[PretendedNccl]] = []
    _communicators: ClassVar[dict[str, _Communicator]] = {}

    def __init__(self, store: Any, rank: int, size: int, options: PretendedNccl.Options) -> None:
        for name, default in (
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
            ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ):
            if os.environ.get(name, default) != "0":
                raise RuleBroken(f"the watchdog would end the process: {name}")
        if options._timeout < timedelta(hours=1) or options.config.blocking != 0:
            raise RuleBroken("a timeout of torch's, or a call that blocks, which no abort ends")
        self.store, self.rank, self.size = store, rank, size
        self.has_aborted = False
        self._communicator: _Communicator | None = None
        self._calls: list[_Call] | None = None
        self._owner = 0
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.rank == 0:
            name = uuid.uuid4().hex
            self._communicators[name] = _Communicator()
            self.store.set("nccl", name)
        communicator = self._communicators[bytes(self.store.get("nccl")).decode()]
        with communicator.lock:
            communicator.gpus[self.rank] = _here.gpu
            communicator.streams[self.rank] = deque()
            communicator.lock.notify_all()
            ready = communicator.lock.wait_for(lambda: len(communicator.gpus) == self.size, WAIT_S)
            if not ready or len(set(communicator.gpus.values())) < self.size:
                raise RuntimeError("ncclInvalidUsage: Duplicate GPU detected, or a rank is missing")
        self._communicator = communicator

    def _start_coalescing(self) -> None:
        self._check()
        if self._calls is not None:
            raise RuleBroken("a group within a group")
        self._calls, self._owner = [], threading.get_ident()

    def send(self, tensors: Sequence[torch.Tensor], other: int, tag: int) -> Work | None:
        return self._call(tensors, other, is_sent=True)

    def recv(self, tensors: Sequence[torch.Tensor], other: int, tag: int) -> Work | None:
        return self._call(tensors, other, is_sent=False)

    def _call(self, tensors: Sequence[torch.Tensor], other: int, *, is_sent: bool) -> Work | None:
        self._check()
        (tensor,) = tensors
        if not isinstance(tensor, GpuTensor) or not tensor.is_contiguous():
            raise RuntimeError("Tensors must be CUDA and dense")
        if other == self.rank or not 0 <= other < self.size:
            raise RuntimeError(f"invalid rank {other}")
        call = _Call(tensor.values.view(-1).view(torch.uint8), other, is_sent)
        if self._calls is None:
            return self._enqueue([call])
        if self._owner != threading.get_ident():
            raise RuleBroken("another thread's call within a group")
        self._calls.append(call)
        return None

    def _end_coalescing(self) -> Work:
        self._check()
        calls, self._calls = self._calls, None
        if not calls:
            raise RuleBroken("a group without a call has no work")
        return self._enqueue(calls)

    def _enqueue(self, calls: list[_Call]) -> Work:
        assert self._communicator is not None
        work = Work(self._communicator, self.rank, calls)
        with self._communicator.lock:
            for call in calls:
                if not call.is_sent:
                    call.values_B.fill_(NONSENSE)
            self._communicator.streams[self.rank].append(work)
        return work

    def abort(self) -> None:
        self.has_aborted = True
        if self._communicator is not None:
            with self._communicator.lock:
                self._communicator.aborted.add(self.rank)
                self._communicator.streams[self.rank].clear()

    def _check(self) -> None:
        if self.has_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        if self._communicator is None:
            raise RuleBroken("a communicator of each pair would form, one after the other")
