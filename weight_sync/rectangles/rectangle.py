"""Rectangles of checkpoint tensors and the places where they lie (pure; needs no torch).

Owns the geometry that learner ranks and engine workers share. Both sides are lists of `Placement`; only
(tensor, rectangle) ever travels, `local` stays on its side.
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

    @property
    def long_axes(self) -> list[int]:
        """Axes along which it has more than one element."""
        return [axis for axis, size in enumerate(self.shape) if size > 1]

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
    """`rectangle` of the checkpoint's `tensor` lies at `local` of a process' parameter `holder`.

    Attributes:
        order: The axes of `rectangle` longer than one, in the order in which those of `local` run; ascending
            unless a loader transposes.
    """

    tensor: str
    rectangle: Rectangle
    holder: str
    local: Rectangle
    order: tuple[int, ...]

    def find_local(self, part: Rectangle) -> Rectangle:
        """Return where `part` of the rectangle lies in the holder."""
        start, stop = list(self.local.start), list(self.local.stop)
        axes, seen = self.rectangle.long_axes, part.within(self.rectangle)
        for axis, source in zip(self.local.long_axes, self.order, strict=True):
            first = start[axis]
            start[axis] = first + seen.start[axes[source]]
            stop[axis] = first + seen.stop[axes[source]]
        return Rectangle(tuple(start), tuple(stop))
