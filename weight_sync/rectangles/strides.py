"""Elements of a view, as rectangles of the tensor that it is of (pure; needs no torch).

A view is sizes, strides and offset over a dense row-major tensor. Axes that run on as one are joined, those
that run over the end of a dimension are split; then each axis walks along one dimension, and what walks along
them without steps is a rectangle. Invariant: the rectangles together are all elements of the view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.core.errors import SyncError
from weight_sync.rectangles.rectangle import Rectangle

UNBOUNDED = 1 << 62


class NotARectangle(SyncError):
    """A view that rectangles cannot describe."""


@dataclass(frozen=True, slots=True)
class View:
    """A view of a dense row-major tensor of shape `base`; strides and offset in elements."""

    base: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Axis(NamedTuple):
    size: int
    stride: int


class _Walk(NamedTuple):
    """A dimension that a stride walks along: its length in elements, and whether it takes each one."""

    dimension: int
    extent: int
    is_dense: bool


def find_rectangles(view: View, most: int) -> Iterator[Rectangle]:
    """Yield the rectangles of a view that has elements.

    Raises:
        NotARectangle: There are more than `most`, or parts of rows among them.
    """
    # An axis of stride 0 repeats elements; the order in which axes are read does not matter.
    axes = [_Axis(*axis) for axis in zip(view.sizes, view.strides, strict=True) if axis[0] > 1 and axis[1]]
    axes.sort(key=lambda axis: -axis.stride)
    for count, rectangle in enumerate(_cut(_split(_join(axes), view.base), view.base, view.offset)):
        if count == most:
            raise NotARectangle(f"a view of more than {most} rectangles")
        yield rectangle


def _join(axes: Sequence[_Axis]) -> list[_Axis]:
    """Make one axis of neighbours that run on as one."""
    joined: list[_Axis] = []
    for axis in axes:
        if joined and joined[-1].stride == axis.size * axis.stride:
            joined[-1] = _Axis(joined[-1].size * axis.size, axis.stride)
        else:
            joined.append(axis)
    return joined


def _split(axes: Sequence[_Axis], base: tuple[int, ...]) -> list[_Axis]:
    """Cut axes that run over the end of a dimension."""
    done: list[_Axis] = []
    todo = list(reversed(axes))
    while todo:
        size, stride = todo.pop()
        extent = _walk(base, stride).extent
        if (size - 1) * stride < extent:
            done.append(_Axis(size, stride))
            continue
        room, rest = divmod(extent, stride)
        if rest or room == 1 or size % room:
            raise NotARectangle(f"a run of {size} strides of {stride} over rows of {extent}")
        todo.append(_Axis(room, stride))
        todo.append(_Axis(size // room, stride * room))
    return done


def _cut(axes: list[_Axis], base: tuple[int, ...], offset: int) -> Iterator[Rectangle]:
    """Yield one rectangle if each axis is dense and alone in its dimension, else one per step."""
    walks = [_walk(base, axis.stride) for axis in axes]
    stepped = _find_stepped(walks)
    if stepped is None:
        yield _place(
            base, offset, {walk.dimension: axis.size for walk, axis in zip(walks, axes, strict=True)}
        )
        return
    axis, rest = axes[stepped], axes[:stepped] + axes[stepped + 1 :]
    for step in range(axis.size):
        yield from _cut(rest, base, offset + step * axis.stride)


def _find_stepped(walks: Sequence[_Walk]) -> int | None:
    """Return the axis to take step by step: one that leaves elements out, or the outer one of a dimension."""
    for index, walk in enumerate(walks):
        if not walk.is_dense:
            return index
    for index, walk in enumerate(walks):
        if any(walk.dimension == other.dimension for other in walks[index + 1 :]):
            return index
    return None


def _steps(shape: Sequence[int]) -> list[int]:
    """Return the strides of a dense row-major tensor."""
    steps = [1] * len(shape)
    for dimension in reversed(range(len(shape) - 1)):
        steps[dimension] = steps[dimension + 1] * shape[dimension + 1]
    return steps


def _walk(base: tuple[int, ...], stride: int) -> _Walk:
    """Return how a stride walks through the tensor."""
    for dimension, step in enumerate(_steps(base)):
        if base[dimension] != 1 and stride >= step and stride % step == 0:
            return _Walk(dimension, base[dimension] * step if dimension else UNBOUNDED, stride == step)
    raise NotARectangle(f"a stride of {stride} elements in a tensor of shape {base}")


def _place(base: tuple[int, ...], offset: int, extents: dict[int, int]) -> Rectangle:
    start = []
    for step in _steps(base):
        start.append(offset // step)
        offset %= step
    stop = [first + extents.get(dimension, 1) for dimension, first in enumerate(start)]
    if any(last > size for last, size in zip(stop, base, strict=True)):
        raise NotARectangle(f"a view of {start} to {stop} of a tensor of shape {base}")
    return Rectangle(tuple(start), tuple(stop))
