"""Plan of parcels: which source sends which rectangles to which workers (pure; needs no torch).

Knows tensors and rectangles only; where they lie on either side is that side's business. Owns the balance
over sources and their network cards. Invariants: each element that a worker wants reaches it in exactly one
parcel, from a source that holds it; the plan follows from its input alone, so every process may make it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.core.errors import SyncError
from weight_sync.rectangles.rectangle import Rectangle

PARCEL_BYTES = 64 << 20
SMALL = 0.005
"""Share of a source's mean load up to which what the same sources hold is sent by one of them."""
MAX_ROUNDS, SETTLED = 200, 1e-4
"""Of sharing out: rounds, and the share of all bytes that a last round still moves."""

Region = tuple[str, Rectangle]
"""A rectangle of the named tensor."""
_Parties = tuple[int, ...]


class NobodyHolds(SyncError):
    """A worker wants elements that no source holds."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """`rectangle` of `tensor`, read once by source number `source` and brought to each worker of `sinks`."""

    tensor: str
    rectangle: Rectangle
    num_bytes: int
    source: int
    sinks: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return self.num_bytes // self.rectangle.num_elements


@dataclass(frozen=True, slots=True)
class _Cell:
    """A rectangle that the same sources hold and the same workers want."""

    rectangle: Rectangle
    sources: _Parties
    sinks: _Parties


class _Work(NamedTuple):
    tensor: str
    num_bytes: int
    cell: _Cell


def plan_parcels(
    held: Sequence[Iterable[Region]],
    wanted: Sequence[Iterable[Region]],
    item_bytes: Mapping[str, int],
    *,
    cards: Sequence[int] = (),
    max_bytes: int = PARCEL_BYTES,
) -> list[Parcel]:
    """Return the parcels in the order of tensors, none over `max_bytes` unless one row is.

    Args:
        held: Regions by source; what several hold is divided among them by bytes.
        wanted: Regions by worker.
        item_bytes: Bytes per element, by tensor.
        cards: Network card of each source; all sources of a card share its rate. Left out: a card each.

    Raises:
        NobodyHolds: Something wanted is held by no source.
    """
    by_tensor_held, by_tensor_wanted = _by_tensor(held), _by_tensor(wanted)
    known: dict[object, list[_Cell]] = {}
    work: list[_Work] = []
    for tensor, wishes in by_tensor_wanted.items():
        holders, size = by_tensor_held.get(tensor, {}), item_bytes[tensor]
        key = (tuple(holders.items()), tuple(wishes.items()), size)
        cells = known.get(key)
        if cells is None:
            cells = known[key] = list(_make_cells(tensor, holders, wishes, max(1, max_bytes // size)))
        work += [_Work(tensor, cell.rectangle.num_elements * size, cell) for cell in cells]
    chosen = _choose(work, len(held), cards or range(len(held)))
    return [
        Parcel(tensor, cell.rectangle, num_bytes, source, cell.sinks)
        for (tensor, num_bytes, cell), source in zip(work, chosen, strict=True)
    ]


def _choose(work: Sequence[_Work], num_sources: int, cards: Sequence[int]) -> list[int]:
    """Return the source of each piece of work.

    What the same sources hold is a class. Each class is shared out so that cards, and sources of a card,
    send alike; then its pieces, ordered by their workers, fill one source's share after the other's, so
    that a worker hears from few sources.
    """
    by_holders: dict[_Parties, list[int]] = {}
    for index, piece in enumerate(work):
        by_holders.setdefault(piece.cell.sources, []).append(index)
    sizes = {sources: sum(work[i].num_bytes for i in found) for sources, found in by_holders.items()}
    small = SMALL * sum(sizes.values()) / max(1, num_sources)
    filler = _Filler(work, num_sources)
    classes = [sources for sources, size in sizes.items() if size > small]
    for sources, shares in zip(
        classes, _share_by_card(classes, [sizes[one] for one in classes], cards), strict=True
    ):
        filler.fill(by_holders[sources], shares)
    for sources, size in sizes.items():
        if size <= small:
            filler.fill_from_one(by_holders[sources], sources)
    return filler.chosen


def _share_by_card(
    classes: Sequence[_Parties], sizes: Sequence[float], cards: Sequence[int]
) -> Iterator[dict[int, float]]:
    """Yield the bytes that each holder of a class sends: even over cards, then over the sources of each."""
    of_cards = share_out(
        [(sorted({cards[one] for one in some}), size) for some, size in zip(classes, sizes, strict=True)]
    )
    parts = [
        ([one for one in sources if cards[one] == card], size)
        for sources, shares in zip(classes, of_cards, strict=True)
        for card, size in shares.items()
    ]
    of_parts = iter(share_out(parts))
    for shares in of_cards:
        yield {source: size for _ in shares for source, size in next(of_parts).items()}


class _Filler:
    """Gives each piece of work to a source; what is rounded in one class is made good in the next."""

    def __init__(self, work: Sequence[_Work], num_sources: int) -> None:
        self.chosen = [0] * len(work)
        self._work = work
        self._excess = [0.0] * num_sources
        self._connected: set[_Parties] = set()

    def fill(self, indices: Sequence[int], shares: Mapping[int, float]) -> None:
        """Divide one class over its sources: the pieces of the same workers stay together."""
        left = {source: share - self._excess[source] for source, share in shares.items()}
        source, sinks = next(iter(left)), _Parties()
        for index in sorted(indices, key=lambda index: (self._work[index].cell.sinks, index)):
            _, size, cell = self._work[index]
            if cell.sinks != sinks or left[source] < size / 2:
                source, sinks = self._choose(cell.sinks, left, size), cell.sinks
            self.chosen[index] = source
            left[source] -= size
        self._excess = [-left.get(source, -excess) for source, excess in enumerate(self._excess)]

    def fill_from_one(self, indices: Sequence[int], sources: _Parties) -> None:
        """Give a class that is too small to matter to the holder that is connected to most of its workers."""
        sinks = sorted({sink for index in indices for sink in self._work[index].cell.sinks})
        source = self._choose(tuple(sinks), dict.fromkeys(sources, 0.0), 0)
        for index in indices:
            self.chosen[index] = source

    def _choose(self, sinks: _Parties, left: Mapping[int, float], size: int) -> int:
        """Return a source with room, or the one with most: connected to the most of `sinks` before others."""
        having = [source for source, room in left.items() if room >= size / 2] or [
            max(left, key=left.__getitem__)
        ]
        new = {source: sum((source, sink) not in self._connected for sink in sinks) for source in having}
        source = min(having, key=lambda one: (new[one], -left[one], one))
        self._connected.update((source, sink) for sink in sinks)
        return source


def share_out(demands: Sequence[tuple[Sequence[int], float]]) -> list[dict[int, float]]:
    """Return how much of each demand each of its parties takes; the busiest takes as little as can be.

    Demand after demand is poured anew over what the others left, as water is over steps: the sum of the
    squares of all loads falls until no demand can be moved to a party with less.
    """
    load: dict[int, float] = {party: 0.0 for parties, _ in demands for party in parties}
    taken: list[dict[int, float]] = [{} for _ in demands]
    for _ in range(MAX_ROUNDS):
        moved = 0.0
        for number, (parties, amount) in enumerate(demands):
            before = taken[number]
            base = {party: load[party] - before.get(party, 0.0) for party in parties}
            taken[number] = now = _pour(amount, base)
            moved += sum(abs(now[party] - before.get(party, 0.0)) for party in parties)
            load.update({party: base[party] + now[party] for party in parties})
        if moved <= SETTLED * sum(amount for _, amount in demands):
            break
    return taken


def _pour(amount: float, base: Mapping[int, float]) -> dict[int, float]:
    """Return how much each party takes so that those that take any end at one level."""
    steps = sorted(base.values())
    below, level = 0.0, 0.0
    for count, step in enumerate(steps, start=1):
        below += step
        level = (amount + below) / count
        if count == len(steps) or level <= steps[count]:
            break
    return {party: max(0.0, level - step) for party, step in base.items()}


def _by_tensor(parties: Sequence[Iterable[Region]]) -> dict[str, dict[Rectangle, _Parties]]:
    """Return, by tensor and rectangle, the numbers of those that have it, ascending."""
    found: dict[str, dict[Rectangle, list[int]]] = {}
    for number, regions in enumerate(parties):
        for tensor, rectangle in regions:
            having = found.setdefault(tensor, {}).setdefault(rectangle, [])
            if not having or having[-1] != number:
                having.append(number)
    return {tensor: {r: tuple(having) for r, having in by.items()} for tensor, by in found.items()}


def _make_cells(
    tensor: str, held: Mapping[Rectangle, _Parties], wanted: Mapping[Rectangle, _Parties], max_elements: int
) -> Iterator[_Cell]:
    """Cut the tensor at every edge of every rectangle, join what is alike, cut that to size."""
    dimensions = range(len(next(iter(wanted)).start))
    edges = [sorted({edge for r in (*held, *wanted) for edge in (r.start[i], r.stop[i])}) for i in dimensions]
    sources, sinks = _spread(held, edges), _spread(wanted, edges)
    alike: dict[tuple[_Parties, _Parties], list[Rectangle]] = {}
    for index, to in sorted(sinks.items()):
        start = tuple(edges[i][index[i]] for i in dimensions)
        rectangle = Rectangle(start, tuple(edges[i][index[i] + 1] for i in dimensions))
        if index not in sources:
            raise NobodyHolds(f"workers {list(to)} want {rectangle} of '{tensor}', which nobody holds")
        alike.setdefault((sources[index], to), []).append(rectangle)
    for (having, to), rectangles in alike.items():
        for rectangle in _join(rectangles):
            yield from (_Cell(piece, having, to) for piece in _cut(rectangle, max_elements))


def _spread(
    rectangles: Mapping[Rectangle, _Parties], edges: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], _Parties]:
    """Return who has each cell of the grid of `edges`."""
    having: dict[tuple[int, ...], set[int]] = {}
    for rectangle, parties in rectangles.items():
        bounds = zip(edges, rectangle.start, rectangle.stop, strict=True)
        spans = [range(bisect_left(edge, start), bisect_left(edge, stop)) for edge, start, stop in bounds]
        for index in itertools.product(*spans):
            having.setdefault(index, set()).update(parties)
    return {index: tuple(sorted(parties)) for index, parties in having.items()}


def _join(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Join rectangles that touch along one dimension and agree in the others, the last dimension first."""
    for i in reversed(range(len(rectangles[0].start))):
        lines: dict[tuple[tuple[int, ...], ...], list[Rectangle]] = {}
        for r in rectangles:
            line = lines.setdefault((r.start[:i] + r.start[i + 1 :], r.stop[:i] + r.stop[i + 1 :]), [])
            if line and line[-1].stop[i] == r.start[i]:
                line[-1] = Rectangle(line[-1].start, r.stop)
            else:
                line.append(r)
        rectangles = sorted(itertools.chain.from_iterable(lines.values()), key=lambda r: r.start)
    return rectangles


def _cut(rectangle: Rectangle, max_elements: int) -> Iterator[Rectangle]:
    """Cut between rows into about equal pieces of at most `max_elements`."""
    if rectangle.num_elements <= max_elements:
        yield rectangle
        return
    first, num_rows = rectangle.start[0], rectangle.shape[0]
    rows_each = max(1, max_elements // math.prod(rectangle.shape[1:]))
    count = -(-num_rows // rows_each)
    for piece in range(count):
        start, stop = first + num_rows * piece // count, first + num_rows * (piece + 1) // count
        yield Rectangle((start, *rectangle.start[1:]), (stop, *rectangle.stop[1:]))
