"""Pipeline of copies between a GPU and the host's memory through two pinned buffers, either way.

A copy of memory that is not pinned has a tenth of the bus's rate, and the host waits for it. Here the bus
moves one buffer while the host fills or empties the other. Copies are made on a stream of their own, after
what the current stream has been given before.
Invariants: a buffer that came from the GPU is read once its event has happened; a buffer is filled again once
its last copy has happened, and, if that came from the GPU, once it has been read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

BUFFER_BYTES = 64 << 20
"""Of each buffer: calls cost more than what a cache saves."""

T = TypeVar("T")


class Copy(NamedTuple, Generic[T]):
    """A copy to be made; `name` tells when it is.

    Attributes:
        source: On the GPU or on the host, at most as large as a buffer in the target's dtype. Any strides.
        target: On the other side, of the same shape. Any strides.
    """

    source: torch.Tensor
    target: torch.Tensor
    name: T


@dataclass(frozen=True)
class _Issued(Generic[T]):
    copy: Copy[T]
    staged: torch.Tensor
    event: torch.cuda.Event


class PinnedPipeline:
    """Two pinned buffers and a stream, made once and used for many copies.

    >>> # pipeline = PinnedPipeline(BUFFER_BYTES)
    >>> # for end in pipeline.run(Copy(part, place, place_end) for ...):
    """

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._stream = torch.cuda.Stream()
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._num_issued = 0

    def run(self, copies: Iterable[Copy[T]]) -> Iterator[T]:
        """Make the copies in their order; yield the name of each.

        From the GPU, when yielded: the copy is complete, of the state after the work that the current stream
        had when the first copy was requested. To the GPU: its source has been read, and later work on the
        current stream sees the values.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        issued: _Issued[T] | None = None
        for copy in copies:
            following = self._issue(copy)
            if issued is not None:
                yield _finish(issued)
            issued = following
        if issued is not None:
            yield _finish(issued)

    def _issue(self, copy: Copy[T]) -> _Issued[T]:
        index, event = self._num_issued % 2, torch.cuda.Event()
        self._num_issued += 1
        dtype = copy.target.dtype
        num_bytes = copy.target.numel() * dtype.itemsize
        staged = self._buffers[index][:num_bytes].view(dtype).view(copy.target.shape)
        before = self._events[index]
        if before is not None:
            before.synchronize()
        if not copy.source.is_cuda:
            staged.copy_(copy.source)
        with torch.cuda.stream(self._stream):
            if copy.source.is_cuda:
                packed = copy.source.to(dtype).contiguous()  # columns are gathered where that is fast
                staged.copy_(packed, non_blocking=True)
            else:
                copy.target.copy_(staged, non_blocking=True)
            event.record(self._stream)
        self._events[index] = event
        return _Issued(copy, staged, event)


def _finish(issued: _Issued[T]) -> T:
    copy = issued.copy
    if copy.source.is_cuda:
        issued.event.synchronize()
        copy.target.copy_(issued.staged)
    else:
        torch.cuda.current_stream().wait_event(issued.event)
    return copy.name
