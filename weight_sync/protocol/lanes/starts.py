"""Begin of rounds: which members get the newest version now, and in which lane (pure).

A member maps what a process of its node has, goes directly where its engine can, reads the folder, or is sent
the version with others. It is sent by rounds that begin together, one for each stripe, and only while the
publishers of all are heard: who holds some stripes waits for the rest. Invariants: an offer is of the newest
published version; a member is in one round of each stripe, besides those that it has left or is done with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weight_sync.protocol.copies.sharing import CopySharing, Holder
from weight_sync.protocol.lanes.stripes import WHOLE, Stripe
from weight_sync.protocol.members import Member
from weight_sync.protocol.messages import MapCopy, Offer
from weight_sync.protocol.rounds import Lane, Part, Phase, Round, Sender
from weight_sync.protocol.state import CoordinationState


class RoundStarts:
    """See the module. `active` are the rounds under way, by id; those that begin are added."""

    def __init__(self, state: CoordinationState, active: dict[int, Round], sharing: CopySharing) -> None:
        self._state, self._active, self._sharing = state, active, sharing

    def find_in(self, lane: Lane) -> Round | None:
        """Return an active round of a lane that has one of each stripe at most."""
        return next((round_ for round_ in self._active.values() if round_.lane is lane), None)

    def begin(self, now: float) -> None:
        """Begin the rounds that can begin."""
        state = self._state
        senders = state.senders
        if state.current is None or not senders:
            return
        number = state.current.number
        lagging = [member for member in state.in_order(state.lagging) if member.newest < number]
        wanting = [member for member in lagging if member.may_be_offered(number, now)]
        state.lagging = {one.name for one in wanting} | {one.name for one in lagging if now < one.retry_at}
        if not wanting:
            return
        heard = [member for member in wanting if not state.is_silent(member.last_seen, now)]
        able = [member for member in heard if not _is_busy(member, self._active.values())]
        direct = [member for member in able if state.goes_directly(member)]
        able = [member for member in able if member not in direct]
        for holder, mappers in self._sharing.find_mappers(able).items():
            self._map(holder, mappers, now)
        if not any(state.is_silent(sender.last_seen, now) for sender in senders):
            if direct and self.find_in(Lane.DIRECT) is None:
                self._begin_offer(Lane.DIRECT, direct, now)
            able = [member for member in able if member.staging is None]
            readers = [member for member in able if member.by_folder] if senders[0].folder else []
            for member in self._sharing.choose_receivers(readers, self._active.values()):
                self._begin_offer(Lane.FOLDER, [member], now)
            self._offer_to([member for member in able if not member.by_folder], now)

    def _offer_to(self, able: list[Member], now: float) -> None:
        """Begin the rounds that can begin with some of these members."""
        together = [member for member in able if not member.is_lone]
        if self.find_in(Lane.MAIN) is None:
            self._offer(Lane.MAIN, together, now)
        elif self.find_in(Lane.JOINERS) is None:
            self._offer(Lane.JOINERS, [member for member in together if not member.newest], now)
        if self.find_in(Lane.LONE) is None:
            lone = [member for member in able if member.is_lone]
            # The member that came furthest first: it is the least likely to take all of its deadline.
            self._offer(Lane.LONE, sorted(lone, key=lambda member: -member.num_buckets), now, most=1)

    def _offer(self, lane: Lane, wanting: list[Member], now: float, most: int | None = None) -> None:
        if members := self._sharing.choose_receivers(wanting, self._active.values())[:most]:
            self._begin_offer(lane, members, now)

    def _begin_offer(self, lane: Lane, members: Sequence[Member], now: float) -> None:
        is_direct = lane is Lane.DIRECT
        for stripe in [WHOLE] if is_direct else [sender.stripe for sender in self._state.senders]:
            round_ = self._begin(lane, members, Part.OFFERED, now, stripe)
            for member in members:
                number = round_.version.number
                offer = Offer(round_.id, number, is_direct, stripe.index, stripe.count)
                self._state.order(member.name, offer)

    def _map(self, holder: Holder, members: list[Member], now: float) -> None:
        """Let members map what a process of their node holds; the deadline is that of an offer."""
        round_ = self._begin(Lane.MAPPED, members, Part.RECEIVING, now)
        round_.phase, round_.sender, round_.receivers = Phase.TRANSFER, Sender.SENT, tuple(round_.parts)
        round_.holder, round_.holder_incarnation = holder.name, holder.incarnation
        for member in members:
            self._state.order(member.name, MapCopy(round_.id, round_.version.number, holder.path))

    def _begin(
        self, lane: Lane, members: Sequence[Member], part: Part, now: float, stripe: Stripe = WHOLE
    ) -> Round:
        version = self._state.current
        assert version is not None, "there is a version to send or to map"
        until, parts = now + self._state.deadlines(lane).offer_s, {member.name: part for member in members}
        round_ = Round(
            self._state.next_id(), lane, version, now, until, parts, phase_began=now, stripe=stripe
        )
        self._active[round_.id] = round_
        for member in members:
            member.staging = version.number
        return round_


def _is_busy(member: Member, active: Iterable[Round]) -> bool:
    """Tell whether it is in a round: one that it has left is not judged with it, and may end later."""
    rounds = (round_ for round_ in active if member.name in round_.parts)
    return any(not round_.has_left(member.name) for round_ in rounds)
