"""Orders of a round's transfer: its group, the ranks of its members, and who is told when (pure).

Owns the memberships. On the direct path a group has the publisher's seats first, then those of each member,
in rank order. Invariant: a membership number names one set of processes for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import msgspec

from weight_sync.protocol.lanes.stripes import PUBLISHER
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.messages import Transfer
from weight_sync.protocol.rounds import GroupCache, Lane, Part, Phase, Round
from weight_sync.protocol.state import CoordinationState


class Transfers:
    """See the module. `active` are the rounds under way, by id."""

    def __init__(self, state: CoordinationState, active: Mapping[int, Round], groups: GroupCache) -> None:
        self._state, self._active, self._groups = state, active, groups

    def begin(self, round_: Round, now: float) -> None:
        """Start the transfer to the members that have accepted."""
        state, names = self._state, round_.those(Part.ACCEPTED)
        publisher, stripe = state.publishers[round_.stripe.publisher], round_.stripe
        end = round_.started + state.deadlines(round_.lane).deadline_s - state.timing.settle_s
        round_.phase, round_.receivers, round_.phase_began = Phase.TRANSFER, tuple(names), now
        round_.until = max(end, now + state.timing.settle_s)
        is_by_folder = round_.lane is Lane.FOLDER
        sources = publisher.seats if round_.lane is Lane.DIRECT else 0
        root = (PUBLISHER, f"{sources} seats") if sources else (f"stripe {stripe.index}", "")
        key = (root, *((name, state.members[name].incarnation) for name in names))
        found = None if is_by_folder else self._groups.find(key)
        round_.membership = found or state.next_id()
        if found is None and not is_by_folder:
            self._groups.add(key, round_.membership, stripe.count)
        round_.transfer = _transfer_of(state, publisher, round_, self._find_live(), now)
        state.order(stripe.publisher, round_.transfer)
        if not is_by_folder:
            self.start_receiving(round_, now)

    def start_receiving(self, round_: Round, now: float) -> None:
        """Let the members receive: at once, or from the folder when all is stored there."""
        assert round_.transfer is not None, "the publisher was told first"
        if round_.has(Part.ACCEPTED):
            round_.phase_began = now
        deadline_s, live = max(0.0, round_.until - now), self._find_live()  # a folder's round begins later
        transfer = msgspec.structs.replace(round_.transfer, deadline_s=deadline_s, live=live)
        sizes = [_count_ranks(self._state, round_, name) for name in round_.receivers]
        ranks = itertools.accumulate(sizes, initial=transfer.sources or 1)
        for rank, name in zip(ranks, round_.receivers, strict=False):
            if round_.parts[name] is Part.ACCEPTED:
                round_.set_part(name, Part.RECEIVING)
                self._state.order(name, msgspec.structs.replace(transfer, rank=rank))

    def _find_live(self) -> tuple[int, ...]:
        return tuple(self._groups.live(other.membership for other in self._active.values()))


def _count_ranks(state: CoordinationState, round_: Round, name: str) -> int:
    return state.members[name].seats if round_.lane is Lane.DIRECT else 1


def _transfer_of(
    state: CoordinationState, publisher: PublisherInfo, round_: Round, live: tuple[int, ...], now: float
) -> Transfer:
    """Return the order of a round's transfer to the publisher."""
    number = round_.version.number
    is_by_folder, is_direct = round_.lane is Lane.FOLDER, round_.lane is Lane.DIRECT
    sources = publisher.seats if is_direct else 0
    return Transfer(
        round=round_.id,
        number=number,
        membership=round_.membership,
        rank=0,
        world=(sources or 1) + sum(_count_ranks(state, round_, name) for name in round_.receivers),
        store_host=publisher.store_host,
        store_port=publisher.store_port,
        live=live,
        deadline_s=round_.until - now,
        base=state.common_base(round_.receivers, number, is_direct=is_direct),
        folder=f"{publisher.folder}/{number}" if is_by_folder else "",
        afresh=is_by_folder and any(state.members[name].num_failures for name in round_.receivers),
        sources=sources,
    )
