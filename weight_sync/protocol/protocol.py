"""The weight-sync protocol as a pure state machine: no I/O, time is an argument.

Owns the effect of each event; events come in through methods, orders go out through `take_orders`. What
follows from events for the others is worked out when orders are taken or time passes, once for all events
since: a thousand reports that come together cost one look at a thousand members, not a thousand.
Each part keeps its own promises: `members` the states, `rounds` the rounds, `attribution` the blame,
`swap_scheduler` the swaps; `peer` is the other side. Events may come twice, late, or of a peer that is gone.
Invariants: a member that missed a deadline is fenced until it has caught up; numbers only rise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from asyncrl.core.staleness import UNLOADED, PolicyVersion
from weight_sync.protocol.lanes.publishers import Publishers
from weight_sync.protocol.lanes.stripes import PUBLISHER
from weight_sync.protocol.members import Member, MemberState, PublisherInfo
from weight_sync.protocol.messages import ReceiverHello, Withdraw
from weight_sync.protocol.round_manager import RoundManager
from weight_sync.protocol.round_reports import RoundReports, SilenceCheck
from weight_sync.protocol.rounds import (
    Lane,
    Order,
    Part,
    Round,
    Timing,
)
from weight_sync.protocol.state import CoordinationState
from weight_sync.protocol.swap_scheduler import SwapScheduler
from weight_sync.sync_records import Record

__all__ = ["PUBLISHER", "Coordination"]

OVERDUE_S = 0.02
"""Between two looks at a deadline that has passed without ending anything."""


class Coordination:
    """See the module.

    Args:
        token: The coordinator's fencing token; rises with every start of a coordinator.
        uses_delta: Let differences be sent where all members of a round hold the same version.
        fences: Version numbers that members must serve before they take leases, as the coordinator before
            this one has left them.
        max_unavailable, uses_direct: As of `CoordinationState`.
    """

    def __init__(
        self,
        timing: Timing,
        parallelism: int = 1,
        token: int = 0,
        uses_delta: bool = False,
        fences: Mapping[str, int] | None = None,
        max_unavailable: float | None = None,
        uses_direct: bool = False,
    ) -> None:
        self._state = CoordinationState(timing, parallelism, token, uses_delta, max_unavailable, uses_direct)
        self._rounds = RoundManager(self._state)
        self._reports = RoundReports(self._state, self._rounds)
        self._silence = SilenceCheck(self._state, self._rounds)
        self._publishers = Publishers(self._state, self._rounds)
        self._swap_scheduler = SwapScheduler(self._state)
        self._ticked: float | None = None
        self._changed_at: float | None = None
        self._due_at = math.inf
        self._inherited_fences = dict(fences or {})

    @property
    def timing(self) -> Timing:
        return self._state.timing

    @property
    def token(self) -> int:
        return self._state.token

    @property
    def members(self) -> dict[str, Member]:
        return self._state.members

    @property
    def fences(self) -> dict[str, int]:
        """Fenced members, with the version number that ends the fence; also members that are not back yet."""
        fenced = self._state.in_order(self._state.fenced)
        own = {member.name: member.fenced_until for member in fenced if member.fenced_until is not None}
        self._state.fenced = set(own)
        return {**self._inherited_fences, **own}

    @property
    def publisher(self) -> PublisherInfo | None:
        return self._state.publisher

    @property
    def publishers(self) -> Mapping[str, PublisherInfo]:
        return self._state.publishers

    @property
    def current(self) -> PolicyVersion | None:
        return self._state.current

    @property
    def counters(self) -> Counter[str]:
        return self._state.counters

    @property
    def culprit(self) -> str:
        """The last blamed peer, and the cause."""
        return self._state.culprit

    @property
    def rounds(self) -> list[Round]:
        """The rounds under way."""
        return list(self._rounds.active.values())

    @property
    def round(self) -> Round | None:
        """The round of most members, or another one if there is none."""
        return self._rounds.find_in(Lane.MAIN) or next(iter(self._rounds.active.values()), None)

    @property
    def last_round_s(self) -> float | None:
        return self._rounds.last_round_s

    def take_orders(self) -> list[Order]:
        """Return the orders since the last call, oldest first, those of the last events among them."""
        self._settle()
        return self._state.take_orders()

    def take_records(self) -> list[Record]:
        """Return the records to log and journal since the last call, oldest first."""
        self._settle()
        return self._state.take_records()

    # --- membership -------------------------------------------------------------------------------

    def hello(self, info: ReceiverHello, now: float) -> bool:
        """A receiver joins, or joins again; it gets the newest version in the next round.

        Returns:
            False if it must not: it has retired, or a newer process lives under its name.
        """
        known = self.members.get(info.name)
        is_silent = known is None or self._state.is_silent(known.last_seen, now)
        if known is not None and known.is_usurped(info, is_silent=is_silent):
            self.counters["refused_hellos"] += 1
            return False
        if known is not None:
            self._rounds.leave(known, now)
            self._rounds.groups.forget(info.name)  # its seats may be other ones
        self._state.forget_orders(info.name)
        if known is not None and known.incarnation == info.incarnation:
            self._state.forget_progress(known)
            self._raise(known)
        else:
            inherited = self._inherited_fences.pop(info.name, None)
            fence, rank = (known.fenced_until, known.rank) if known else (inherited, len(self.members))
            known = Member(info.name, info.incarnation, now, fenced_until=fence, rank=rank)
            self.members[info.name] = known
            self._state.fenced.add(info.name)
            self._swap_scheduler.forget(info.name)
            self._rounds.forget(info.name)
        known.take_info(info, now)
        if info.staged > info.serving:
            self._swap_scheduler.ask(known, info.staged)
        known.catch_up()
        self._note_change(now, info.name)
        return True

    def _raise(self, member: Member) -> None:
        """Take back a member that was DEAD; it counts again after a report of its replica.

        Which the order makes it do; it is given again with each hello, for a hello discards older orders.
        """
        if member.state is MemberState.DEAD:
            member.move(MemberState.SYNCING)
            member.is_unheard = True
        if member.is_unheard:
            self._state.order(member.name, Withdraw())

    def publisher_hello(
        self, publisher: PublisherInfo, current: PolicyVersion | None, now: float, num_bytes: int = 0
    ) -> bool:
        """The publisher joins, or joins again; it has given up all rounds and groups.

        Args:
            num_bytes: Size of `current`.

        Returns:
            False if it must not: a newer publisher lives.
        """
        if not self._publishers.join(publisher, current, now, num_bytes):
            return False
        self._note_change(now)
        return True

    def seen(self, name: str, incarnation: str, now: float) -> bool:
        """Note that a peer spoke; False means that it must say hello first."""
        self._forgive(now)
        publisher = self._state.publishers.get(name)
        if publisher is not None:
            if publisher.incarnation != incarnation:
                return False
            is_back = self._state.is_silent(publisher.last_seen, now)
            publisher.last_seen, publisher.is_missed = now, False
        else:
            member = self.members.get(name)
            if member is None or member.incarnation != incarnation or not member.is_listening:
                return False
            is_back = self._state.is_silent(member.last_seen, now)
            member.last_seen = now
            if member.state is MemberState.SUSPECT:
                member.catch_up()
                self._touch(name)
        if is_back:
            self._note_change(now)  # a round may begin
        return True

    def drain(self, name: str, now: float) -> None:
        """Give the member nothing new from now on."""
        member = self.members[name]
        if member.is_listening:
            self._rounds.leave(member, now, is_gone=False)
            member.move(MemberState.DRAINING)
        self._note_change(now, name)

    def retire(self, name: str, now: float) -> None:
        """The member leaves for good."""
        member = self.members[name]
        if member.is_listening:
            self._rounds.leave(member, now)
            member.move(MemberState.RETIRED)
            self._state.forget_progress(member)
            self._rounds.groups.forget(name)
        self._note_change(now, name)

    def publisher_leaves(self, now: float, name: str = PUBLISHER) -> None:
        """The publisher ends in order."""
        self._publishers.leave(name, now)
        self._note_change(now)

    def pin(self, name: str, now: float) -> None:
        """Hold the member at its version; a commit that was not taken up waits."""
        member = self.members[name]
        member.is_pinned = True
        self._swap_scheduler.take_back(member)
        self._rounds.leave(member, now, is_gone=False)
        member.catch_up()
        self._note_change(now, name)

    def unpin(self, name: str, now: float) -> None:
        """Let the member follow again."""
        self.members[name].is_pinned = False
        self.members[name].catch_up()
        self._note_change(now, name)

    def seats_changed(self, name: str, num_seats: int, now: float) -> None:
        """So many processes of the peer take part in direct rounds from now on; they are in no group yet."""
        if name == PUBLISHER:
            if self.publisher is not None:
                self.publisher.seats = num_seats
            self._rounds.leave_direct_path(now)
            self._note_change(now)
        elif name in self.members:  # further publishers have none
            self.members[name].seats, self.members[name].direct_base = num_seats, UNLOADED
            self._rounds.groups.forget(name)
            self._note_change(now, name)

    # --- versions and rounds ----------------------------------------------------------------------

    def published(
        self, version: PolicyVersion, now: float, num_bytes: int = 0, path: str = "", name: str = PUBLISHER
    ) -> None:
        """A version of that size is ready at a publisher; older unsent ones are skipped.

        Args:
            path: Name under which it may be mapped on the publisher's node.
        """
        self._publishers.note(name, version, num_bytes, path)
        self._note_change(now)

    def accepted(self, name: str, round_id: int, now: float) -> None:
        """The member has made room for the offer."""
        round_ = self._rounds.find(round_id)
        if round_ is not None and round_.parts.get(name) is Part.OFFERED:
            self._rounds.set_part(round_, name, Part.ACCEPTED)
        self._note_change(now, name)

    def progressed(self, name: str, round_id: int, num_steps: int, now: float) -> None:
        """The member goes on with a round, which is a sign of its life: so many steps are done."""
        self.members[name].last_seen = now
        if (round_ := self._rounds.find(round_id)) is not None:
            round_.note_progress(name, num_steps, now)

    def verified(
        self, name: str, round_id: int, number: int, now: float, path: str = "", is_complete: bool = True
    ) -> None:
        """The member holds what the round brings of version `number` with the right digests.

        Args:
            path: Name under which others of its node may map it; a copy that it has mapped itself has none.
            is_complete: It holds all stripes of the version.
        """
        member = self.members[name]
        if not is_complete:
            self._reports.note_stripe(member, self._rounds.find(round_id))
            self._note_change(now, name)
            return
        self._reports.note_verified(member, self._rounds.find(round_id), number, path, now)
        if member.is_listening and number > max(member.serving, member.staged or 0, member.swapping or 0):
            self._swap_scheduler.ask(member, number)
        self._note_change(now, name)

    def failed(self, name: str, round_id: int, cause: str, now: float, num_buckets: int = 0) -> None:
        """The member could not accept, receive or verify. Cause `transport` means a broken group.

        Args:
            num_buckets: Number of buckets received.
        """
        if (round_ := self._rounds.find(round_id)) is not None:
            self._reports.note_failed(self.members[name], round_, cause, num_buckets, now)
        self._note_change(now, name)

    def sent(self, round_id: int, num_bytes: int, now: float) -> None:
        """The publisher has sent all buckets of the round."""
        if (round_ := self._rounds.find(round_id)) is not None:
            self._reports.note_sent(round_, num_bytes, now)
        self._note_change(now)

    def send_failed(self, round_id: int, cause: str, now: float, begun_s: float = math.inf) -> None:
        """The publisher could not send, or answers an abort; `superseded`: the version is gone already.

        Args:
            begun_s: For how long it had been sending by then; `NEVER` if it had not begun, infinite if it
                does not say.
        """
        if (round_ := self._rounds.find(round_id)) is not None:
            self._reports.note_send_failed(round_, cause, begun_s, now)
        self._note_change(now)

    # --- swaps ------------------------------------------------------------------------------------

    def attended(self, name: str, now: float) -> None:
        """A replica asks the member for weights."""
        self.members[name].hear_replica(is_attended=True)
        self._note_change(now, name)

    def restarted(self, name: str, serving: int, now: float) -> None:
        """The replica beside the member was started anew and serves `serving`."""
        member = self.members[name]
        self._swap_scheduler.take_back(member)
        member.serving, member.direct_base = serving, UNLOADED
        member.hear_replica(is_attended=True)
        self._note_change(now, name)

    def loaded(self, name: str, number: int, is_ok: bool, error: str, now: float) -> None:
        """The engine has loaded `number`, or has failed to and holds nothing usable."""
        member = self.members[name]
        if not is_ok:
            self._swap_scheduler.note_failed_load(member, number, error, now)
        elif number >= member.serving:
            self._swap_scheduler.note_load(member, number, now)
        self._note_change(now, name)

    def lost(self, name: str, number: int, now: float) -> None:
        """The member's engine has lost version `number`, which it held itself and did not serve yet."""
        member = self.members[name]
        self._swap_scheduler.take_back(member)
        if member.staged == number:
            member.staged = None
            member.leave_direct_path(number, is_blameless=True)
        self._note_change(now, name)

    # --- time -------------------------------------------------------------------------------------

    def wake_at(self) -> float:
        """Return when `tick` is to be called, if nothing happens before.

        Every half of a poll at the latest: silence is noticed then, and that this process did not run.
        """
        if self._changed_at is not None or self._ticked is None:
            return -math.inf
        return min(self._due_at, self._ticked + self.timing.poll_s / 2)

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._settle()
        self._forgive(now)
        self._silence.look(now)
        self._rounds.check_publishers(now)
        self._swap_scheduler.check_deadlines(now)
        self._note_change(now)
        self._settle()

    def _forgive(self, now: float) -> None:
        """Put all deadlines off by a time in which this process did not run."""
        away_s, self._ticked = (now - self._ticked if self._ticked is not None else 0.0), now
        if away_s <= self.timing.poll_s:
            return
        self._state.shift(away_s, now)
        self._swap_scheduler.put_off()
        for round_ in self.rounds:
            round_.shift(away_s)

    def _note_change(self, now: float, name: str = "") -> None:
        """Note an event, and the member of which it is, if it is one's."""
        self._forgive(now)
        self._changed_at = now
        if name:
            self._touch(name)

    def _touch(self, name: str) -> None:
        """Have the member looked at when things are settled: it may be offered, or load, a version now."""
        self._state.lagging.add(name)
        self._swap_scheduler.look(self.members[name])

    def _settle(self) -> None:
        """Go on with rounds and swaps after the events that were noted."""
        if self._changed_at is None:
            return
        now, self._changed_at = self._changed_at, None
        self._rounds.advance(now)
        self._swap_scheduler.grant(now)
        due = min(self._rounds.due_at(now), self._swap_scheduler.due_at())
        self._due_at = due if due > now else now + OVERDUE_S
