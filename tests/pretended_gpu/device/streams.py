"""Streams of a pretended GPU: a copy from or to pinned memory happens as late as a GPU may make it.

What is computed is there at once. A copy to the host leaves nonsense until the host has waited for it, one to
the GPU until the stream that reads it has waited for it; until the host, or the stream that writes there, has
waited for that, nothing may be written where it is read from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

Seen = dict[int, int]
"""By stream: the last copy that has happened for whoever has seen this much."""


class ReusedTooEarly(RuntimeError):
    """The host wrote into pinned memory that a copy to the GPU may still read."""


@dataclass(eq=False)
class _Copy:
    stream: int
    number: int
    make: Callable[[], object] | None
    """None once it is made."""
    is_to_host: bool
    pinned: torch.Tensor

    def has_happened(self, seen: Seen) -> bool:
        return self.number <= seen.get(self.stream, 0)


@dataclass
class Streams:
    """Copies that the host has not waited for, in their order."""

    current: int = 0
    copies: list[_Copy] = field(default_factory=list)
    num_issued: int = 0
    seen: dict[int, Seen] = field(default_factory=dict)
    """By stream: the copies that its next work comes after."""

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Give what is done within the block to `stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def copy_to_host(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Begin a copy into pinned memory."""
        self.check_write(target, self.now(self.current))
        source = values.clone()
        self._issue(lambda: target.copy_(source), True, target)
        target.fill_(float("nan") if target.is_floating_point() else 1)

    def copy_to_gpu(self, target: torch.Tensor, pinned: torch.Tensor) -> None:
        """Begin a copy of pinned memory into the values of a tensor of the GPU."""
        self._issue(lambda: target.copy_(pinned), False, pinned)
        if self.current:
            target.fill_(float("nan") if target.is_floating_point() else 1)
        else:
            self.order(0, self.now(0))  # all that is computed comes after it

    def now(self, stream: int) -> Seen:
        """Return what work that `stream` is given from now on comes after."""
        return {**self.seen.get(stream, {}), stream: self.num_issued}

    def order(self, stream: int, seen: Seen) -> None:
        """Have `stream` wait for `seen`; what is computed from now on sees what that copied to the GPU."""
        own = self.seen.setdefault(stream, {})
        own.update({other: max(number, own.get(other, 0)) for other, number in seen.items()})
        for copy in self.copies:
            if copy.has_happened(seen) and not copy.is_to_host:
                self._make(copy)

    def wait(self, seen: Seen | None = None) -> None:
        """Have the host wait for `seen`, or for all copies."""
        for copy in list(self.copies):
            if seen is None or copy.has_happened(seen):
                self._make(copy)
                self.copies.remove(copy)

    def check_write(self, tensor: torch.Tensor, seen: Seen | None = None) -> None:
        """Raise ReusedTooEarly if a copy to the GPU may still read what is about to be written.

        Args:
            seen: What the writer comes after; None for the host, which has seen what it has waited for.
        """
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.itemsize
        for copy in self.copies:
            pinned = copy.pinned
            first = pinned.data_ptr()
            is_shared = first < end and start < first + pinned.numel() * pinned.itemsize
            if is_shared and not copy.is_to_host and not copy.has_happened(seen or {}):
                raise ReusedTooEarly(f"copy {copy.number} may still read the {tuple(tensor.shape)} here")

    def _issue(self, make: Callable[[], object], is_to_host: bool, pinned: torch.Tensor) -> None:
        self.num_issued += 1
        self.copies.append(_Copy(self.current, self.num_issued, make, is_to_host, pinned))

    @staticmethod
    def _make(copy: _Copy) -> None:
        make, copy.make = copy.make, None
        if make is not None:
            make()


STREAMS = Streams()
