"""Element-wise copies between two views, as pairs of rectangles (pure; needs no torch).

A view is sizes, strides and offset over a dense row-major tensor. Axes that both sides run through as one are
joined, axes that run over the end of a dimension are split; then each axis walks along one dimension of
either tensor, and what walks along them without steps is a rectangle. Invariant: the rectangles of one copy
are disjoint on both sides and together are all that the copy reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.core.errors import SyncError
from weight_sync.rectangles.rectangle import Rectangle

UNBOUNDED = 1 << 62


class NotARectangle(SyncError):
    """A copy that rectangles cannot describe."""


@dataclass(frozen=True, slots=True)
class View:
    """A view of a dense row-major tensor of shape `base`; strides and offset in elements."""

    base: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Pair(NamedTuple):
    """A rectangle of the source that a copy brings to one of the target; `order` as in `Placement`."""

    source: Rectangle
    target: Rectangle
    order: tuple[int, ...]


class _Axis(NamedTuple):
    size: int
    source_stride: int
    target_stride: int


class _Walk(NamedTuple):
    """A dimension that a stride walks along: how many strides fit, and whether it takes each element."""

    dimension: int
    room: int
    is_dense: bool


def match(source: View, target: View) -> Iterator[Pair]:
    """Yield the pairs of rectangles of an element-wise copy between two views of equal sizes.

    Raises:
        NotARectangle: The sizes differ, an axis broadcasts, or a view is of no dense tensor.
    """
    if source.sizes != target.sizes:
        raise NotARectangle(f"a copy of sizes {source.sizes} to {target.sizes}")
    strides = zip(source.sizes, source.strides, target.strides, strict=True)
    axes = [_Axis(*axis) for axis in strides if axis[0] != 1]
    if all(axis.size for axis in axes):
        yield from _cut(_split(_join(axes), source, target), source, target)


def _join(axes: Sequence[_Axis]) -> list[_Axis]:
    """Make one axis of neighbours that both sides run through as one."""
    joined: list[_Axis] = []
    for axis in axes:
        before = joined[-1] if joined else None
        runs_on = before is not None and before[1:] == (axis.size * axis[1], axis.size * axis[2])
        if before is not None and runs_on:
            joined[-1] = axis._replace(size=before.size * axis.size)
        else:
            joined.append(axis)
    return joined


def _split(axes: Sequence[_Axis], source: View, target: View) -> list[_Axis]:
    """Cut axes that run over the end of a dimension of either side's tensor."""
    done: list[_Axis] = []
    todo = list(reversed(axes))
    while todo:
        size, *strides = todo.pop()
        rooms = (_walk(source, strides[0]).room, _walk(target, strides[1]).room)
        room = next((room for room in rooms if size > room), None)
        if room is None:
            done.append(_Axis(size, *strides))
            continue
        if size % room:
            raise NotARectangle(f"a run of {size} elements over rows of {room}")
        todo.append(_Axis(room, *strides))
        todo.append(_Axis(size // room, strides[0] * room, strides[1] * room))
    return done


def _cut(axes: list[_Axis], source: View, target: View) -> Iterator[Pair]:
    """Yield one pair if each axis is dense and alone in its dimension on both sides, else one per step."""
    walks = [(_walk(source, axis.source_stride), _walk(target, axis.target_stride)) for axis in axes]
    stepped = _find_stepped(walks)
    if stepped is None:
        sizes = [axis.size for axis in axes]
        dimensions = [(a.dimension, b.dimension) for a, b in walks]
        yield Pair(
            _place(source, [a for a, _ in dimensions], sizes),
            _place(target, [b for _, b in dimensions], sizes),
            _order(dimensions),
        )
        return
    axis, rest = axes[stepped], axes[:stepped] + axes[stepped + 1 :]
    for step in range(axis.size):
        yield from _cut(
            rest, _move(source, step * axis.source_stride), _move(target, step * axis.target_stride)
        )


def _find_stepped(walks: Sequence[tuple[_Walk, _Walk]]) -> int | None:
    """Return the axis to take step by step: one that leaves elements out, or the outer one of a dimension."""
    for index, (a, b) in enumerate(walks):
        if not (a.is_dense and b.is_dense):
            return index
    for index, (a, b) in enumerate(walks):
        if any(a.dimension == c.dimension or b.dimension == d.dimension for c, d in walks[index + 1 :]):
            return index
    return None


def _steps(shape: Sequence[int]) -> list[int]:
    """Return the strides of a dense row-major tensor."""
    steps = [1] * len(shape)
    for dimension in reversed(range(len(shape) - 1)):
        steps[dimension] = steps[dimension + 1] * shape[dimension + 1]
    return steps


def _walk(view: View, stride: int) -> _Walk:
    """Return how a stride walks through the view's tensor."""
    if stride <= 0:
        raise NotARectangle("a copy that broadcasts")
    for dimension, step in enumerate(_steps(view.base)):
        if view.base[dimension] != 1 and stride >= step and stride % step == 0:
            room = max(1, view.base[dimension] * step // stride) if dimension else UNBOUNDED
            return _Walk(dimension, room, stride == step)
    raise NotARectangle(f"a stride of {stride} elements in a tensor of shape {view.base}")


def _move(view: View, num_elements: int) -> View:
    return View(view.base, view.sizes, view.strides, view.offset + num_elements)


def _place(view: View, dimensions: Sequence[int], sizes: Sequence[int]) -> Rectangle:
    start, offset = [], view.offset
    for step in _steps(view.base):
        start.append(offset // step)
        offset %= step
    extent = [1] * len(view.base)
    for dimension, size in zip(dimensions, sizes, strict=True):
        extent[dimension] = size
    stop = [first + count for first, count in zip(start, extent, strict=True)]
    if any(last > size for last, size in zip(stop, view.base, strict=True)):
        raise NotARectangle(f"a copy of {start} to {stop} of a tensor of shape {view.base}")
    return Rectangle(tuple(start), tuple(stop))


def _order(dimensions: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the source's axes in the target's order, numbered among those that are longer than one."""
    by_source = sorted(source for source, _ in dimensions)
    return tuple(by_source.index(source) for source, _ in sorted(dimensions, key=lambda pair: pair[1]))
