"""Active rounds, from offer to end: their members, pending answers, and outcome (pure).

Owns the active rounds; `lanes` has which of them begin, and their orders. A round per version, stripe of it
and set of members: offer → transfer → verify, or map → verify where a process of the members' node has the
version.
Invariants: an offer is always of the newest published version; no round outlasts its deadline.
"""

from __future__ import annotations

import math

from weight_sync.protocol.copies.sharing import CopySharing
from weight_sync.protocol.failure_attribution import FailureAttribution
from weight_sync.protocol.lanes.starts import RoundStarts
from weight_sync.protocol.lanes.stripes import PUBLISHER
from weight_sync.protocol.lanes.transfers import Transfers
from weight_sync.protocol.members import Member
from weight_sync.protocol.messages import Abort, Close
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
from weight_sync.protocol.state import CoordinationState


class RoundManager:
    """See the module."""

    def __init__(self, state: CoordinationState) -> None:
        self._state = state
        self._attribution = FailureAttribution(state)
        self.sharing = CopySharing(state)
        self.active: dict[int, Round] = {}
        self.groups = GroupCache()
        self._starts = RoundStarts(state, self.active, self.sharing)
        self.transfers = Transfers(state, self.active, self.groups)
        self.last_round_s: float | None = None

    def advance(self, now: float) -> None:
        """Go on with every round and start those that can start."""
        for round_ in list(self.active.values()):
            if round_.phase is Phase.OFFER:
                self._progress_offer(round_, now)
            else:
                self._progress_transfer(round_, now)
            if round_.is_over:
                self._close(round_, now)
        self._starts.begin(now)

    def due_at(self, now: float) -> float:
        """Return when `advance` has something to do, if nothing happens before."""
        rounds = (one.until if one.settle_until is None else one.settle_until for one in self.active.values())
        return min(min(rounds, default=math.inf), self._state.next_retry_at(now))

    def find(self, round_id: int) -> Round | None:
        """Return the active round with that id."""
        return self.active.get(round_id)

    def find_in(self, lane: Lane) -> Round | None:
        """Return the active round of a lane that has one at most."""
        return self._starts.find_in(lane)

    def is_awaited(self, member: Member) -> bool:
        """Tell whether a round waits for the member."""
        return any(round_.parts.get(member.name) in OPEN_PARTS for round_ in self.active.values())

    def set_part(self, round_: Round, name: str, part: Part) -> None:
        """Note a member's progress."""
        round_.set_part(name, part)
        if part in FINAL_PARTS and not self._is_in_sibling(round_, name, *OPEN_PARTS):
            self._state.members[name].staging = None
            self._state.lagging.add(name)

    def _is_in_sibling(self, round_: Round, name: str, *parts: Part) -> bool:
        """Tell whether the member's part is one of `parts` in a round of another stripe of the version."""
        return not round_.stripe.is_whole and any(
            other is not round_ and other.version == round_.version and other.parts.get(name) in parts
            for other in self.active.values()
        )

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

    def check_publishers(self, now: float) -> None:
        """Blame a silent publisher once, and end the rounds that still need it."""
        for publisher in self._state.publishers.values():
            if publisher.is_missed or not self._state.is_silent(publisher.last_seen, now):
                continue
            publisher.is_missed = True
            name = publisher.stripe.publisher
            rounds = [one for one in self.active.values() if one.stripe.publisher == name]
            needing = [round_ for round_ in rounds if round_.sender is Sender.PENDING]
            for round_ in needing:
                self._lose_publisher(round_, SILENT, now)
            if not needing:
                self._state.blame_publisher(publisher.stripe, SILENT)

    def leave_publisher(self, name: str, cause: str, now: float) -> None:
        """Drop a publisher and every group; without a `cause` no peer is blamed."""
        self.groups.clear()
        for round_ in self.active.values():
            if round_.stripe.publisher == name:
                self._lose_publisher(round_, cause, now)

    def leave_direct_path(self, now: float) -> None:
        """Drop the groups of the learner's ranks, which are other ones now."""
        self.groups.forget(PUBLISHER)
        if (round_ := self.find_in(Lane.DIRECT)) is not None:
            self.break_up(round_, PUBLISHER_LOST, now)

    def hear_publisher(self, round_: Round, began: float) -> None:
        """Note a report of the publisher about the round.

        One that began to send when its time was over, at the earliest, or never, kept all waiting.
        """
        is_late = round_.broken_by in OVERDUE and round_.broken_at is not None and began >= round_.broken_at
        if round_.awaits_publisher and (is_late or began == math.inf):
            self._state.blame_publisher(round_.stripe, "had not begun to send", round_)
        round_.has_publisher_spoken = True
        if (publisher := self._state.publishers.get(round_.stripe.publisher)) is not None:
            publisher.num_unanswered = 0

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
        self._state.order(round_.stripe.publisher, Abort(round_.id))
        for name in round_.those(*OPEN_PARTS):
            self._state.order(name, Abort(round_.id))
        for name in round_.those(Part.OFFERED, Part.ACCEPTED):
            self.set_part(round_, name, Part.FAILED)

    def fail_to_send(self, round_: Round, cause: str, now: float) -> None:
        """End a round that the publisher could not send; for its store it is blamed, and no member."""
        is_store = cause.startswith(STORE)
        self.break_up(round_, cause if is_store or cause == SUPERSEDED else TRANSPORT, now)
        if is_store:
            self._state.blame_publisher(round_.stripe, cause, round_)

    # --- progress -----------------------------------------------------------------------------------

    def _progress_offer(self, round_: Round, now: float) -> None:
        if now >= min(round_.until, round_.look_at):
            for name in round_.those(Part.OFFERED, Part.ACCEPTED):
                if (cause := self._attribution.lateness_of(round_, name, now)) is not None:
                    self._leave_out(round_, name, cause)
            self._attribution.note_heard(round_)
        if not round_.has(Part.OFFERED) and round_.has(Part.ACCEPTED):
            self.transfers.begin(round_, now)

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
        publisher = self._state.publishers.get(round_.stripe.publisher)
        round_.has_publisher_spoken = True
        round_.broken_by = round_.causes[PUBLISHER] = PUBLISHER_LOST
        if publisher is not None:
            publisher.num_unanswered += 1
        if publisher is None or publisher.last_seen <= asked:
            self._state.blame_publisher(round_.stripe, SILENT, round_)
        elif publisher.num_unanswered > 1:
            self._state.blame_publisher(round_.stripe, "no answer to aborts", round_)

    def _lose_publisher(self, round_: Round, cause: str, now: float) -> None:
        if round_.is_broken or round_.is_over or round_.is_mapped:
            return
        self.break_up(round_, PUBLISHER_LOST, now)
        if cause:
            self._state.blame_publisher(round_.stripe, cause, round_)

    def _leave_out(self, round_: Round, name: str, cause: str) -> None:
        """Wait for a member no longer, and blame it, once for all stripes of the version."""
        member = self._state.members[name]
        is_blamed = self._is_in_sibling(round_, name, Part.LEFT_OUT)
        if not (round_.is_mapped or is_blamed):
            member.part_from_others()
        self.set_part(round_, name, Part.LEFT_OUT)
        round_.causes[name] = cause
        self._state.order(name, Abort(round_.id))
        if not is_blamed:
            self._state.blame(member, cause, round_)

    def _close(self, round_: Round, now: float) -> None:
        del self.active[round_.id]
        if round_.lane is Lane.FOLDER:
            self._state.order(round_.stripe.publisher, Close(round_.id))
        self._state.counters["rounds"] += 1
        if round_.has_spoilt_group:
            self.groups.drop(round_.membership)
        if round_.is_broken or round_.those(Part.FAILED, Part.LEFT_OUT):
            self._state.counters["rounds_failed"] += 1
        else:
            self.last_round_s = now - round_.started
        self._attribution.judge(round_, now)
