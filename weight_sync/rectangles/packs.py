"""Packs: parcels of one source for the same workers, dense, one after another in one message.

A column cut of a large checkpoint is millions of runs of a few hundred bytes; packed, it is one copy per
parcel and one message per `max_bytes`. Owns the place of each parcel in its pack and the copies into packs,
on any device. Invariant: both sides come to the same packs from the same parcels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncrl.core.errors import SyncError
from weight_sync.encoding.choice import choose_width
from weight_sync.memory.parts import Part
from weight_sync.rectangles.parcels import PARCEL_BYTES, Parcel
from weight_sync.rectangles.rectangle import Placement, Rectangle

ALIGN_BYTES = 16


@dataclass(frozen=True)
class Pack:
    """Parcels with the same source and workers; `offsets` are their first bytes."""

    source: int
    sinks: tuple[int, ...]
    parcels: tuple[Parcel, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    def gaps(self) -> Iterator[slice]:
        """Yield the places of bytes between parcels."""
        ends = (offset + parcel.num_bytes for offset, parcel in zip(self.offsets, self.parcels, strict=True))
        yield from (
            slice(end, start) for end, start in zip(ends, self.offsets[1:], strict=False) if end < start
        )

    @property
    def width(self) -> int:
        """Bytes per element, for differences between versions."""
        counts: Counter[int] = Counter()
        for parcel in self.parcels:
            counts[parcel.item_bytes] += parcel.num_bytes
        return choose_width(counts, self.num_bytes)


def make_packs(parcels: Iterable[Parcel], max_bytes: int = PARCEL_BYTES) -> list[Pack]:
    """Return the packs, none over `max_bytes` unless it is a single parcel."""
    by_parties: dict[tuple[int, tuple[int, ...]], list[Parcel]] = {}
    for parcel in parcels:
        by_parties.setdefault((parcel.source, parcel.sinks), []).append(parcel)
    return [
        pack
        for (source, sinks), group in by_parties.items()
        for pack in _fill(source, sinks, group, max_bytes)
    ]


def _fill(source: int, sinks: tuple[int, ...], parcels: Sequence[Parcel], max_bytes: int) -> Iterator[Pack]:
    taken: list[Parcel] = []
    offsets: list[int] = []
    end = 0
    for parcel in parcels:
        offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        if taken and offset + parcel.num_bytes > max_bytes:
            yield Pack(source, sinks, tuple(taken), tuple(offsets), end)
            taken, offsets, offset = [], [], 0
        taken.append(parcel)
        offsets.append(offset)
        end = offset + parcel.num_bytes
    if taken:
        yield Pack(source, sinks, tuple(taken), tuple(offsets), end)


class Parameters:
    """Parameters of a process, as packs see them.

    Args:
        placements: Which rectangles they are.
        holders: The parameters by name, dense or not, on any device.
        dtypes: Published dtype by tensor; values are converted on the way into a pack.
    """

    def __init__(
        self,
        placements: Iterable[Placement],
        holders: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self._holders, self._dtypes = holders, dtypes
        self._placements: dict[str, list[Placement]] = {}
        for placement in placements:
            self._placements.setdefault(placement.tensor, []).append(placement)

    @torch.no_grad()
    def read(self, pack: Pack, data_B: torch.Tensor) -> None:
        """Copy the pack's parcels out of the parameters; the bytes between them become 0.

        Raises:
            SyncError: They do not have all of a parcel.
        """
        for gap in pack.gaps():
            data_B[gap] = 0
        for values, held in self._pairs(pack, data_B):
            values.copy_(held)

    def find(self, pack: Pack) -> torch.Tensor | None:
        """Return the pack's bytes where they are, if they lie in memory as `read` would put them."""
        at = pack.parcels[0].rectangle.start
        begins = (
            (place, inner)
            for place in self._placements.get(pack.parcels[0].tensor, ())
            if (inner := place.rectangle.meet(pack.parcels[0].rectangle)) is not None and inner.start == at
        )
        if (found := next(begins, None)) is None:
            return None
        first = self._holders[found[0].holder][found[1].within(found[0].rectangle).slices]
        memory, start = first.untyped_storage(), first.storage_offset() * first.itemsize
        if start % ALIGN_BYTES or start + pack.num_bytes > memory.nbytes():
            return None
        nothing_B = torch.empty(0, dtype=torch.uint8, device=first.device)
        data_B = nothing_B.set_(memory, start, (pack.num_bytes,), (1,))
        if any(data_B[gap].any() for gap in pack.gaps()):
            return None
        pairs = self._pairs(pack, data_B)
        return data_B if all(_are_same(values, held) for values, held in pairs) else None

    def _pairs(self, pack: Pack, data_B: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the pieces of a pack, in `data_B` and in the parameters."""
        for parcel, offset in zip(pack.parcels, pack.offsets, strict=True):
            tensor, rectangle = parcel.tensor, parcel.rectangle
            values = view_parcel(parcel, offset, data_B, self._dtypes[tensor])
            left = rectangle.num_elements
            for placement in self._placements.get(tensor, ()):
                if (part := placement.rectangle.meet(rectangle)) is not None:
                    held = self._holders[placement.holder][part.within(placement.rectangle).slices]
                    yield values[part.within(rectangle).slices], held
                    left -= part.num_elements
            if left > 0:
                raise SyncError(f"the parameters do not have all of {rectangle} of '{tensor}'")


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_there = (one.data_ptr(), one.dtype) == (other.data_ptr(), other.dtype)
    return is_there and one.stride() == other.stride()


def view_parcel(parcel: Parcel, offset: int, data_B: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a parcel that begins at byte `offset` of `data_B`."""
    return data_B[offset : offset + parcel.num_bytes].view(dtype).view(parcel.rectangle.shape)


def place_parts(parts: Iterable[Part]) -> tuple[list[Placement], dict[str, torch.Tensor]]:
    """Return the placements of `parts` and their values by holder; a rectangle held twice is placed once.

    Raises:
        SyncError: A part of a tensor of three dimensions or more is no rectangle of it.
    """
    placements: dict[tuple[str, Rectangle], Placement] = {}
    holders: dict[str, torch.Tensor] = {}
    for part in parts:
        rectangle = _rectangle_of(part)
        if rectangle.num_elements == 0 or (part.name, rectangle) in placements:
            continue
        holder = f"{part.name}[{part.row}:, {part.column}:]"
        placements[part.name, rectangle] = Placement(part.name, rectangle, holder)
        holders[holder] = part.values_RC.reshape(rectangle.shape)
    return list(placements.values()), holders


def _rectangle_of(part: Part) -> Rectangle:
    """Return the part's elements in the tensor's own dimensions."""
    shape, (num_rows, num_columns) = part.shape, part.values_RC.shape
    rows = (part.row, part.row + num_rows)
    if len(shape) == 2:
        return Rectangle((rows[0], part.column), (rows[1], part.column + num_columns))
    whole = Rectangle.whole(shape[1:])
    if part.column or num_columns != whole.num_elements:
        raise SyncError(f"columns {part.column} to {part.column + num_columns} of '{part.name}' {shape}")
    return Rectangle((rows[0], *whole.start), (rows[1], *whole.stop)) if shape else Rectangle((), ())
