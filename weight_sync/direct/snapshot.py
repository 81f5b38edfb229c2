"""Snapshots of a learner rank's weights, from which direct transfers send while training goes on.

Owns at most two copies of the rank's own parts, in their published dtypes and on their device; the second
one comes about when a version is published while the one before is sent. Another one is kept as the base of
differences. Invariant: a snapshot that is being sent, or is a base, is never overwritten; a version for which
there was no room has none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.staleness import UNLOADED
from weight_sync.direct.party import UNDER_WAY, Superseded
from weight_sync.direct.transports.choice import HOST
from weight_sync.memory.parts import Part
from weight_sync.rectangles.packs import ALIGN_BYTES, Pack, Parameters, place_parts
from weight_sync.rectangles.parcels import Region
from weight_sync.rectangles.rectangle import Placement

MAX_SLOTS = 2


@dataclass(eq=False)
class _Slot:
    """A copy of the parts; `number` is 0 while it is written."""

    number: int = 0
    num_readers: int = 0
    placements: Sequence[Placement] = ()
    holders: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=lambda: Parameters((), {}, {}))

    def make_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return room for bytes where the copy lies."""
        device = next((holder.device for holder in self.holders.values()), None)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class Snapshots:
    """A source's side of `Party`. One thread takes snapshots, others send them.

    Args:
        keeps_sent: Keep the newest version that was sent, for differences to it: one copy more.
    """

    def __init__(self, runtime: Runtime, *, keeps_sent: bool = False) -> None:
        self._runtime, self._keeps_sent, self._sent = runtime, keeps_sent, UNLOADED
        self._lock, self._news = runtime.lock(), runtime.event()
        self._slots: list[_Slot] = []
        self._newest = 0
        self._buffers: list[torch.Tensor] = []
        self.device = HOST
        self.regions: Sequence[Region] = ()
        self.dtypes: Mapping[str, str] = {}

    @torch.no_grad()
    def take(self, number: int, parts: Sequence[Part], dtypes: Mapping[str, str]) -> bool:
        """Copy `parts` as version `number`; return False if both copies are being sent.

        Args:
            dtypes: Published dtype by tensor.

        Raises:
            SyncError: As `place_parts`.
        """
        placements, held = place_parts(parts)
        slot = self._find_room()
        if slot is not None:
            of = {place.holder: getattr(torch, dtypes[place.tensor]) for place in placements}
            self.dtypes = {place.tensor: dtypes[place.tensor] for place in placements}
            self.regions = [(place.tensor, place.rectangle) for place in placements]
            if slot.placements != placements:
                slot.placements = placements
                slot.holders = _make_holders(held, of)
                published = {place.tensor: of[place.holder] for place in placements}
                slot.parameters = Parameters(placements, slot.holders, published)
            for name, values in held.items():
                slot.holders[name].copy_(values)
            self.device = next((one.device for one in held.values() if one.is_cuda), HOST)
            if self.device != HOST:
                torch.cuda.current_stream(self.device).synchronize()  # packs are cut on another stream
        with self._lock:
            self._newest = number
            if slot is not None:
                slot.number = number
            news, self._news = self._news, self._runtime.event()
        news.set()
        return slot is not None

    def open(
        self,
        number: int,
        packs: Sequence[Pack],
        until: float,
        base: int = UNLOADED,
        device: torch.device = HOST,
    ) -> _Reading:
        """See `Party.open`."""
        while True:
            with self._lock:
                news, slot, old = self._news, self._find(number), self._find(base)
                if slot is not None:
                    old = old if old is not None and old.placements == slot.placements else None
                    for one in filter(None, (slot, old)):
                        one.num_readers += 1
                elif self._newest >= number:
                    raise Superseded(f"version {number} was not kept, the newest is {self._newest}")
            if slot is not None:
                return _Reading(self, slot, old, packs, device)
            if not news.wait(max(0.0, until - self._runtime.now())):
                raise DeadlineExceeded(f"version {number} was not taken in time")

    def keep(self, numbers: Collection[int]) -> None:
        """Do nothing: engines load none of these copies."""

    def take_buffers(self, num_bytes: int, device: torch.device) -> list[torch.Tensor]:
        """Return buffers for packs, those of an earlier reading if they are large enough."""
        with self._lock:
            buffers, self._buffers = self._buffers, []
        if buffers and buffers[0].nbytes >= num_bytes and buffers[0].device == device:
            return buffers
        return [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(UNDER_WAY)]

    def release(self, slots: Iterable[_Slot], buffers: list[torch.Tensor], sent: int) -> None:
        """End a reading of copies, of which version `sent` was sent; 0 for none."""
        with self._lock:
            for slot in slots:
                slot.num_readers -= 1
            self._buffers, self._sent = buffers or self._buffers, max(self._sent, sent)

    def _find(self, number: int) -> _Slot | None:
        return next((one for one in self._slots if one.number == number != UNLOADED), None)

    def _find_room(self) -> _Slot | None:
        with self._lock:
            base = self._find(self._sent) if self._keeps_sent else None
            slots = (one for one in self._slots if not one.num_readers and one is not base)
            slot = min(slots, key=_number, default=None)
            if slot is None and len(self._slots) < MAX_SLOTS + self._keeps_sent:
                slot = _Slot()
                self._slots.append(slot)
            if slot is not None:
                slot.number = 0
            return slot


def _make_holders(
    held: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Return room for a copy of each tensor, one behind the other: most packs are runs of that memory."""
    places: dict[str, tuple[int, int]] = {}
    ends: dict[torch.device, int] = {}
    for name, values in held.items():
        start = -(-ends.get(values.device, 0) // ALIGN_BYTES) * ALIGN_BYTES
        ends[values.device] = start + values.numel() * dtypes[name].itemsize
        places[name] = start, ends[values.device]
    memory = {device: torch.zeros(end, dtype=torch.uint8, device=device) for device, end in ends.items()}
    return {
        name: memory[values.device][slice(*places[name])].view(dtypes[name]).view(values.shape)
        for name, values in held.items()
    }


def _number(slot: _Slot) -> int:
    return slot.number


class _Reading:
    """A source's side of `PackStore`."""

    def __init__(
        self,
        owner: Snapshots,
        slot: _Slot,
        old: _Slot | None,
        packs: Sequence[Pack],
        device: torch.device,
    ) -> None:
        self._owner, self._slot, self._old, self._packs = owner, slot, old, packs
        self._buffers: list[torch.Tensor] = []
        self._device = device

    def pack(self, index: int) -> torch.Tensor:
        """Return a pack where it lies in a snapshot in host memory, or read its parcels out of that."""
        pack, is_here = self._packs[index], self._owner.device == HOST
        if is_here and (found := self._slot.parameters.find(pack)) is not None:
            return found
        if not self._buffers:
            num_bytes = max(one.num_bytes for one in self._packs)
            self._buffers = self._owner.take_buffers(num_bytes, self._device)
        data_B = self._buffers[index % UNDER_WAY][: pack.num_bytes]
        self._slot.parameters.read(pack, data_B)
        return data_B

    def base(self, index: int) -> torch.Tensor | None:
        """Return a pack as it is in the base's snapshot, where that lies."""
        if self._old is None:
            return None
        pack = self._packs[index]
        if (found := self._old.parameters.find(pack)) is not None:
            return found
        data_B = self._old.make_buffer(pack.num_bytes)
        self._old.parameters.read(pack, data_B)
        return data_B

    def close(self, is_whole: bool) -> None:
        """Release the snapshots."""
        slots, sent = filter(None, (self._slot, self._old)), self._slot.number if is_whole else UNLOADED
        self._owner.release(slots, self._buffers, sent)
