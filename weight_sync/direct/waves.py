"""Steps of a transfer: packs along chains of members; and their way in waves, each one group call of NCCL.

The packs of a source leave in order, `WAVE_PACKS` in each wave, and a sink sends on in a wave what came in
the one before. While a wave travels, the packs of the one before are checked and those of the next packed.
A member
  consumes: packs of a source's snapshot, or of the member before   waits for: a wave, until the deadline
  unblocked by: the members of that wave, an abort, the deadline
  produces: packs for the member after, counts
Invariant: every member goes through the waves in one order, and starts one only after those before it. So
nothing can wait in a circle: those who take part in the lowest wave that is not done wait for no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.core.runtime.faults import fault_point
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.party import UNDER_WAY, PackStore
from weight_sync.direct.transports.nccl import Message, NcclGroup
from weight_sync.direct.transports.seals import Seals
from weight_sync.rectangles.packs import Pack

WAVE_PACKS = UNDER_WAY // 2
"""Packs of a source in a wave: as many travel while the next ones are packed."""


@dataclass(frozen=True)
class Step:
    """A pack at one member.

    Attributes:
        index: In the order of all packs.
        source: Rank that it comes from; None at its source.
        target: Rank that it goes to; None at the end of the chain.
        wave: In which it leaves, or would; it has arrived in the one before.
    """

    index: int
    pack: Pack
    source: int | None
    target: int | None
    wave: int = 0


def make_steps(packs: Iterable[Pack], num_sources: int, rank: int) -> list[Step]:
    """Return the steps of a member: sources take turns, and so do the sinks at the head of a chain."""
    num_before: Counter[int] = Counter()
    turns: list[tuple[int, int, Pack]] = []
    for pack in packs:
        turns.append((num_before[pack.source], pack.source, pack))
        num_before[pack.source] += 1
    steps = []
    for index, (turn, _, pack) in enumerate(sorted(turns, key=lambda turn: turn[:2])):
        first = index % len(pack.sinks)
        chain = [pack.source, *(num_sources + sink for sink in pack.sinks[first:] + pack.sinks[:first])]
        if rank in chain:
            at = chain.index(rank)
            source, target = chain[at - 1] if at else None, chain[at + 1] if at + 1 < len(chain) else None
            steps.append(Step(index, pack, source, target, turn // WAVE_PACKS + at))
    return steps


class Count(Protocol):
    """Counts the packs that this member is done with."""

    num_steps: int


def carry_waves(
    group: NcclGroup,
    order: SeatOrder,
    steps: Sequence[Step],
    store: PackStore,
    seals: Seals,
    until: float,
    counter: Count,
) -> int:
    """Carry all packs of this member in waves; return how many came damaged.

    Raises:
        DeadlineExceeded, SyncError: As `Wave.wait`.
    """
    with group.within(until):
        waves = _Waves(order, steps, store, seals, counter)
        messages = waves.prepare(waves.numbers[0]) if waves.numbers else []
        for number, following in zip(waves.numbers, [*waves.numbers[1:], None], strict=True):
            under_way = group.start(messages, until)
            waves.check_arrived()
            messages = waves.prepare(following) if following is not None else []
            under_way.wait()
            waves.end(number)
        waves.check_arrived()
    return waves.num_wrong


class _Waves:
    """The waves of one member in one transfer."""

    def __init__(
        self, order: SeatOrder, steps: Sequence[Step], store: PackStore, seals: Seals, counter: Count
    ) -> None:
        self._order, self._store, self._seals, self._counter = order, store, seals, counter
        self._arriving: dict[int, list[tuple[int, Step]]] = {}
        self._leaving: dict[int, list[tuple[int, Step]]] = {}
        for place, step in enumerate(steps):
            if step.source is not None:
                self._arriving.setdefault(step.wave - 1, []).append((place, step))
            if step.target is not None:
                self._leaving.setdefault(step.wave, []).append((place, step))
        self.numbers = sorted({*self._arriving, *self._leaving})
        self.num_wrong = 0
        self._bytes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._arrived: list[tuple[int, Step]] = []

    def prepare(self, number: int) -> list[Message]:
        """Return the messages of a wave, by pack: so those of each pair have one order at both."""
        messages: list[tuple[int, list[Message]]] = []
        for place, step in self._arriving.get(number, ()):
            assert step.source is not None, "it arrives"
            pair = self._bytes[place] = (self._store.pack(place), self._seals.empty())
            messages.append((step.index, [Message(data_B, step.source, False) for data_B in pair]))
        for place, step in self._leaving.get(number, ()):
            assert step.target is not None, "it leaves"
            pair = self._bytes[place] if step.source is not None else self._pack(place, step)
            messages.append((step.index, [Message(data_B, step.target, True) for data_B in pair]))
        messages.sort(key=lambda one: one[0])
        return [message for _, some in messages for message in some]

    def _pack(self, place: int, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        data_B = self._store.pack(place)
        trailer_B = self._seals.make(step.index, data_B)
        fault_point("direct.source.pack", self._order.number, step.index)
        return data_B, trailer_B

    def end(self, number: int) -> None:
        """Take note that a wave is done; what came with it is checked while the next one travels."""
        self._arrived = self._arriving.get(number, [])
        self._counter.num_steps += sum(step.source is None for _, step in self._leaving.get(number, ()))
        for place, step in self._leaving.get(number, ()):
            if step.source is not None:
                del self._bytes[place]

    def check_arrived(self) -> None:
        """Verify what came with the wave that was done last."""
        arrived, self._arrived = self._arrived, []
        for place, step in arrived:
            data_B, trailer_B = self._bytes[place]
            fault_point("direct.sink.pack", self._order.number, step.index)
            self.num_wrong += not self._seals.fits(step.index, data_B, trailer_B)
            self._counter.num_steps += 1
            if step.target is None:
                del self._bytes[place]
