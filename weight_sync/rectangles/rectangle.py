"""Rectangles of checkpoint tensors (pure; needs no torch).

Owns the geometry that learner ranks and engine workers share. Only (tensor, rectangle) ever travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The elements `start[i] <= index[i] < stop[i]` of a tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of these elements in the tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def meet(self, other: Rectangle) -> Rectangle | None:
        """Return the elements that both have; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        has_none = any(first >= last for first, last in zip(start, stop, strict=True))
        return None if has_none else Rectangle(start, stop)

    def within(self, outer: Rectangle) -> Rectangle:
        """Return it as seen from the first element of `outer`, which contains it."""
        return Rectangle(
            tuple(a - b for a, b in zip(self.start, outer.start, strict=True)),
            tuple(a - b for a, b in zip(self.stop, outer.start, strict=True)),
        )

    @staticmethod
    def whole(shape: Sequence[int]) -> Rectangle:
        """Return all of a tensor of `shape`."""
        return Rectangle((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Placement:
    """`rectangle` of the checkpoint's `tensor` is the tensor `holder` of a process."""

    tensor: str
    rectangle: Rectangle
    holder: str
