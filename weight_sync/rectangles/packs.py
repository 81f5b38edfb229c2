"""Packs: parcels of one source for the same workers, dense, one after another in one message.

A column cut of a large checkpoint is millions of runs of a few hundred bytes; packed, it is one copy per
parcel and one message per `max_bytes`. Owns the place of each parcel in its pack and the copies between packs
and parameters, on any device. Invariant: both sides come to the same packs from the same parcels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from asyncrl.core.errors import SyncError
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


class _Copy(NamedTuple):
    """Elements `in_parcel` of a parcel are those at `local` of a parameter, axes in another order perhaps."""

    in_parcel: Rectangle
    holder: str
    local: Rectangle
    order: tuple[int, ...]
    axes: tuple[int, ...]


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
    """A process' parameters as packs see them.

    Args:
        placements: Where the checkpoint's rectangles lie in them.
        holders: The parameters by name, dense or not, on any device.
        dtypes: Published dtype by tensor; values are converted on the way into a pack and out of it.
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
        self._copies: dict[tuple[str, Rectangle], tuple[_Copy, ...]] = {}

    @torch.no_grad()
    def read(self, pack: Pack, data_B: torch.Tensor) -> None:
        """Copy the pack's parcels out of the parameters."""
        for values, held in self._pairs(pack, data_B):
            values.copy_(held)

    @torch.no_grad()
    def write(self, pack: Pack, data_B: torch.Tensor) -> None:
        """Copy the pack's parcels into the parameters: to each place where they are wanted."""
        for values, held in self._pairs(pack, data_B):
            held.copy_(values)

    def _pairs(self, pack: Pack, data_B: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield equally shaped views: of a parcel in the pack, and of a parameter."""
        for parcel, offset in zip(pack.parcels, pack.offsets, strict=True):
            flat = data_B[offset : offset + parcel.num_bytes].view(self._dtypes[parcel.tensor])
            dense = flat.view(parcel.rectangle.shape)
            for copy in self._find(parcel.tensor, parcel.rectangle):
                values = dense[copy.in_parcel.slices]
                sizes = [values.shape[axis] for axis in copy.axes]
                held = self._holders[copy.holder][copy.local.slices]
                yield (
                    values.reshape(sizes).permute(copy.order),
                    held.reshape([sizes[axis] for axis in copy.order]),
                )

    def _find(self, tensor: str, rectangle: Rectangle) -> tuple[_Copy, ...]:
        key = tensor, rectangle
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = tuple(self._make(tensor, rectangle))
            if sum(copy.in_parcel.num_elements for copy in found) < rectangle.num_elements:
                raise SyncError(f"the parameters do not have all of {rectangle} of '{tensor}'")
        return found

    def _make(self, tensor: str, rectangle: Rectangle) -> Iterator[_Copy]:
        for placement in self._placements.get(tensor, ()):
            part = placement.rectangle.meet(rectangle)
            if part is None:
                continue
            local = placement.find_local(part)
            axes, long = part.long_axes, placement.rectangle.long_axes
            # The part may have one element along an axis along which the placement has more.
            order = tuple(axes.index(long[axis]) for axis in placement.order if long[axis] in axes)
            yield _Copy(part.within(rectangle), placement.holder, local, order, tuple(axes))
