"""Active rounds, from offer to end: their members, pending answers, and outcome (pure).

Owns the active rounds and the memberships. A round per version and set of members: offer → transfer → verify,
or map → verify where a process of the members' node has the version. Invariants: an offer is always of the
newest published version; a membership number names one set of processes for ever; no round outlasts its
deadline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from weight_sync.protocol.copies.sharing import CopySharing, Holder
from weight_sync.protocol.failure_attribution import FailureAttribution
from weight_sync.protocol.members import Member, PublisherInfo
from weight_sync.protocol.messages import Abort, Close, MapCopy, Offer, Transfer
from weight_sync.protocol.rounds import (
    DEADLINE,
    FINAL_PARTS,
    LEFT,
    OPEN_PARTS,
    OVERDUE,
    PUBLISHER_LOST,
    SILENT,
    STALLED,
    STORE,
    SUPERSEDED,
    TRANSPORT,
    GroupCache,
    Lane,
    Part,
    Phase,
    Round,
    Sender,
)
from weight_sync.protocol.state import PUBLISHER, CoordinationState


class RoundManager:
    """See the module."""

    def __init__(self, state: CoordinationState) -> None:
        self._state = state
        self._attribution = FailureAttribution(state)
        self.sharing = CopySharing(state)
        self.active: dict[int, Round] = {}
        self.groups = GroupCache()
        self.last_round_s: float | None = None
        self._num_unanswered = 0

    def advance(self, now: float) -> None:
        """Go on with every round and start those that can start."""
        for round_ in list(self.active.values()):
            if round_.phase is Phase.OFFER:
                self._progress_offer(round_, now)
            else:
                self._progress_transfer(round_, now)
            if round_.is_over:
                self._close(round_, now)
        self._start_rounds(now)

    def due_at(self, now: float) -> float:
        """Return when `advance` has something to do, if nothing happens before."""
        rounds = (one.until if one.settle_until is None else one.settle_until for one in self.active.values())
        return min(min(rounds, default=math.inf), self._state.next_retry_at(now))

    def find(self, round_id: int) -> Round | None:
        """Return the active round with that id."""
        return self.active.get(round_id)

    def find_in(self, lane: Lane) -> Round | None:
        """Return the active round of a lane that has one at most."""
        return next((round_ for round_ in self.active.values() if round_.lane is lane), None)

    def is_awaited(self, member: Member) -> bool:
        """Tell whether a round waits for the member."""
        return any(round_.parts.get(member.name) in OPEN_PARTS for round_ in self.active.values())

    def set_part(self, round_: Round, name: str, part: Part) -> None:
        """Note a member's progress."""
        round_.set_part(name, part)
        if part in FINAL_PARTS:
            self._state.members[name].staging = None
            self._state.lagging.add(name)

    def leave(self, member: Member, now: float, is_gone: bool = True) -> None:
        """Take a member out of its round without blame.

        One that is not gone, only no longer wanted, goes on receiving: the others need it in the group.
        """
        for round_ in list(self.active.values()):
            part = round_.parts.get(member.name)
            if part not in OPEN_PARTS or (part is Part.RECEIVING and not is_gone):
                continue
            self.set_part(round_, member.name, Part.LEFT)
            self._state.order(member.name, Abort(round_.id))
            if part is Part.RECEIVING and not round_.is_mapped:
                self.break_up(round_, LEFT, now)

    def forget(self, name: str) -> None:
        """Drop the progress of a member's earlier process: a new process has its name."""
        self.groups.forget(name)
        for round_ in self.active.values():
            if round_.parts.get(name) in (Part.FAILED, Part.VERIFIED):
                round_.set_part(name, Part.LEFT)

    def check_publisher(self, now: float) -> None:
        """Blame a silent publisher once, and end the rounds that still need it."""
        publisher = self._state.publisher
        if publisher is None or publisher.is_missed or not self._state.is_silent(publisher.last_seen, now):
            return
        publisher.is_missed = True
        needing = [round_ for round_ in self.active.values() if round_.sender is Sender.PENDING]
        for round_ in needing:
            self._lose_publisher(round_, SILENT, now)
        if not needing:
            self._state.blame_publisher(SILENT)

    def leave_publisher(self, cause: str, now: float) -> None:
        """Drop the publisher and every group; without a `cause` no peer is blamed."""
        self.groups.clear()
        for round_ in self.active.values():
            self._lose_publisher(round_, cause, now)

    def hear_publisher(self, round_: Round, began: float) -> None:
        """Note a report of the publisher about the round.

        One that began to send when its time was over, at the earliest, or never, kept all waiting.
        """
        is_late = round_.broken_by in OVERDUE and round_.broken_at is not None and began >= round_.broken_at
        if round_.awaits_publisher and (is_late or began == math.inf):
            self._state.blame_publisher("had not begun to send", round_)
        round_.has_publisher_spoken = True
        self._num_unanswered = 0

    def break_up(self, round_: Round, cause: str, now: float) -> None:
        """Give the group up and ask all for a heartbeat; a member without one in time is the culprit."""
        if round_.is_broken:
            return
        self.groups.drop(round_.membership)  # members that left may be in another round before this one ends
        round_.broken_at, round_.broken_by = now, cause
        round_.settle_until = now + self._state.timing.settle_s
        round_.causes[PUBLISHER] = cause
        is_in_time = cause in OVERDUE or round_.lane is Lane.FOLDER  # a read is the reader's alone
        round_.has_publisher_spoken = is_in_time and round_.sender is Sender.SENT
        if round_.sender is Sender.PENDING:
            round_.sender = Sender.FAILED
        self._state.order(PUBLISHER, Abort(round_.id))
        for name in round_.those(*OPEN_PARTS):
            self._state.order(name, Abort(round_.id))
        for name in round_.those(Part.OFFERED, Part.ACCEPTED):
            self.set_part(round_, name, Part.FAILED)

    def fail_to_send(self, round_: Round, cause: str, now: float) -> None:
        """End a round that the publisher could not send; for its store it is blamed, and no member."""
        is_store = cause.startswith(STORE)
        self.break_up(round_, cause if is_store or cause == SUPERSEDED else TRANSPORT, now)
        if is_store:
            self._state.blame_publisher(cause, round_)

    # --- start --------------------------------------------------------------------------------------

    def _start_rounds(self, now: float) -> None:
        state = self._state
        if state.current is None or state.publisher is None:
            return
        number = state.current.number
        lagging = [member for member in state.in_order(state.lagging) if member.newest < number]
        wanting = [member for member in lagging if member.may_be_offered(number, now)]
        state.lagging = {one.name for one in wanting} | {one.name for one in lagging if now < one.retry_at}
        if not wanting:
            return
        heard = [member for member in wanting if not state.is_silent(member.last_seen, now)]
        able = [member for member in heard if not _is_busy(member, self.active.values())]
        for holder, mappers in self.sharing.find_mappers(able).items():
            self._map(holder, mappers, now)
        if not state.is_silent(state.publisher.last_seen, now):
            able = [member for member in able if member.staging is None]
            readers = [member for member in able if member.by_folder] if state.publisher.folder else []
            for member in self.sharing.choose_receivers(readers, self.active.values()):
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
        if members := self.sharing.choose_receivers(wanting, self.active.values())[:most]:
            self._begin_offer(lane, members, now)

    def _begin_offer(self, lane: Lane, members: list[Member], now: float) -> None:
        round_ = self._begin(lane, members, Part.OFFERED, now)
        for member in members:
            self._state.order(member.name, Offer(round_.id, round_.version.number))

    def _map(self, holder: Holder, members: list[Member], now: float) -> None:
        """Let members map what a process of their node holds; the deadline is that of an offer."""
        round_ = self._begin(Lane.MAPPED, members, Part.RECEIVING, now)
        round_.phase, round_.sender, round_.receivers = Phase.TRANSFER, Sender.SENT, tuple(round_.parts)
        round_.holder, round_.holder_incarnation = holder.name, holder.incarnation
        for member in members:
            self._state.order(member.name, MapCopy(round_.id, round_.version.number, holder.path))

    def _begin(self, lane: Lane, members: list[Member], part: Part, now: float) -> Round:
        version = self._state.current
        assert version is not None, "there is a version to send or to map"
        until, parts = now + self._state.deadlines(lane).offer_s, {member.name: part for member in members}
        round_ = Round(self._state.next_id(), lane, version, now, until, parts, phase_began=now)
        self.active[round_.id] = round_
        for member in members:
            member.staging = version.number
        return round_

    # --- progress -----------------------------------------------------------------------------------

    def _progress_offer(self, round_: Round, now: float) -> None:
        if now >= min(round_.until, round_.look_at):
            for name in round_.those(Part.OFFERED, Part.ACCEPTED):
                if (cause := self._attribution.lateness_of(round_, name, now)) is not None:
                    self._leave_out(round_, name, cause)
            self._attribution.note_heard(round_)
        if not round_.has(Part.OFFERED) and round_.has(Part.ACCEPTED):
            self._start_transfer(round_, now)

    def _start_transfer(self, round_: Round, now: float) -> None:
        state, names = self._state, round_.those(Part.ACCEPTED)
        assert state.publisher is not None, "a round without a publisher is broken"
        end = round_.started + state.deadlines(round_.lane).deadline_s - state.timing.settle_s
        round_.phase, round_.receivers, round_.phase_began = Phase.TRANSFER, tuple(names), now
        round_.until = max(end, now + state.timing.settle_s)
        is_by_folder = round_.lane is Lane.FOLDER
        key = tuple((name, state.members[name].incarnation) for name in names)
        found = None if is_by_folder else self.groups.find(key)
        round_.membership = found or state.next_id()
        if found is None and not is_by_folder:
            self.groups.add(key, round_.membership)
        live = tuple(self.groups.live(other.membership for other in self.active.values()))
        round_.transfer = _transfer_of(state, state.publisher, round_, live, now)
        state.order(PUBLISHER, round_.transfer)
        if not is_by_folder:
            self.start_receiving(round_, now)

    def start_receiving(self, round_: Round, now: float) -> None:
        """Let the members receive: at once, or from the folder when all is stored there."""
        assert round_.transfer is not None, "the publisher was told first"
        if round_.has(Part.ACCEPTED):
            round_.phase_began = now
        transfer = msgspec.structs.replace(round_.transfer, deadline_s=max(0.0, round_.until - now))
        for rank, name in enumerate(round_.receivers, start=1):
            if round_.parts[name] is Part.ACCEPTED:
                self.set_part(round_, name, Part.RECEIVING)
                self._state.order(name, msgspec.structs.replace(transfer, rank=rank))

    def _progress_transfer(self, round_: Round, now: float) -> None:
        if now >= round_.look_at or (round_.is_mapped and now >= round_.until):
            self._leave_out_silent(round_, now)
            self._attribution.note_heard(round_)
        if now >= round_.until and not round_.is_mapped:
            if round_.has(Part.ACCEPTED):
                self.fail_to_send(round_, f"{STORE}: the publisher had not stored all in time", now)
            self.break_up(round_, DEADLINE, now)
        if round_.settle_until is not None and now >= round_.settle_until:
            self._end_settling(round_)

    def _leave_out_silent(self, round_: Round, now: float) -> None:
        for name in round_.those(Part.ACCEPTED, Part.RECEIVING):
            if (cause := self._attribution.lateness_of(round_, name, now)) is not None:
                if round_.is_mapped and cause != SILENT:
                    self.sharing.note_failure(self._state.members[name], round_, cause)
                self._leave_out(round_, name, cause)
                if round_.sender is Sender.PENDING:
                    self.break_up(round_, SILENT, now)
        receiving = round_.those(Part.RECEIVING)
        if receiving and not round_.is_mapped and self._attribution.stands_still(round_, now, *receiving):
            self.break_up(round_, STALLED, now)

    def _end_settling(self, round_: Round) -> None:
        assert round_.broken_at is not None, "only a broken round settles"
        for name in round_.those(Part.RECEIVING):
            has_spoken = self._state.members[name].last_seen > round_.broken_at
            self._leave_out(round_, name, "no answer to an abort" if has_spoken else SILENT)
        if round_.awaits_publisher:
            self._miss_publisher(round_, round_.broken_at)

    def _miss_publisher(self, round_: Round, asked: float) -> None:
        """Judge a publisher that has not answered an abort: gone, or busy if it polls, allowed once."""
        publisher = self._state.publisher
        has_polled = publisher is not None and publisher.last_seen > asked
        self._num_unanswered += 1
        round_.has_publisher_spoken = True
        round_.broken_by = round_.causes[PUBLISHER] = PUBLISHER_LOST
        if not has_polled:
            self._state.blame_publisher(SILENT, round_)
        elif self._num_unanswered > 1:
            self._state.blame_publisher("no answer to aborts", round_)

    def _lose_publisher(self, round_: Round, cause: str, now: float) -> None:
        if round_.is_broken or round_.is_over or round_.is_mapped:
            return
        self.break_up(round_, PUBLISHER_LOST, now)
        if cause:
            self._state.blame_publisher(cause, round_)

    def _leave_out(self, round_: Round, name: str, cause: str) -> None:
        member = self._state.members[name]
        if not round_.is_mapped:
            member.part_from_others()
        self.set_part(round_, name, Part.LEFT_OUT)
        round_.causes[name] = cause
        self._state.order(name, Abort(round_.id))
        self._state.blame(member, cause, round_)

    def _close(self, round_: Round, now: float) -> None:
        del self.active[round_.id]
        if round_.lane is Lane.FOLDER:
            self._state.order(PUBLISHER, Close(round_.id))
        self._state.counters["rounds"] += 1
        if round_.has_spoilt_group:
            self.groups.drop(round_.membership)
        if round_.is_broken or round_.those(Part.FAILED, Part.LEFT_OUT):
            self._state.counters["rounds_failed"] += 1
        else:
            self.last_round_s = now - round_.started
        self._attribution.judge(round_, now)


def _transfer_of(
    state: CoordinationState, publisher: PublisherInfo, round_: Round, live: tuple[int, ...], now: float
) -> Transfer:
    """Return the order of a round's transfer to the publisher."""
    number = round_.version.number
    is_by_folder = round_.lane is Lane.FOLDER
    return Transfer(
        round=round_.id,
        number=number,
        membership=round_.membership,
        rank=0,
        world=len(round_.receivers) + 1,
        store_host=publisher.store_host,
        store_port=publisher.store_port,
        live=live,
        deadline_s=round_.until - now,
        base=state.common_base(round_.receivers, number),
        folder=f"{publisher.folder}/{number}" if is_by_folder else "",
        afresh=is_by_folder and any(state.members[name].num_failures for name in round_.receivers),
    )


def _is_busy(member: Member, active: Iterable[Round]) -> bool:
    """Tell whether it is in a round: one that it has left is not judged with it, and may end later."""
    rounds = (round_ for round_ in active if member.name in round_.parts)
    return any(not round_.has_left(member.name) for round_ in rounds)
