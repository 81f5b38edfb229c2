"""Reports of members and of the publisher about a round, and what each changes in it; silence too (pure).

Owns the time of the next look for silence alone: rounds and members are the round manager's and the
coordination's. A report of a round that is over changes the member alone, whose copy stays where it is.
Invariant: a part of a round that is final stays as it is.
"""

from __future__ import annotations

import math

from asyncrl.core.staleness import UNLOADED
from weight_sync.protocol.failure_attribution import SLACK_S
from weight_sync.protocol.members import Member, MemberState
from weight_sync.protocol.round_manager import RoundManager
from weight_sync.protocol.rounds import DIGEST, OPEN_PARTS, SILENT, TRANSPORT, Part, Round, Sender
from weight_sync.protocol.state import CoordinationState


class RoundReports:
    """See the module. `round_` is None where the round is over, or was never known."""

    def __init__(self, state: CoordinationState, rounds: RoundManager) -> None:
        self._state, self._rounds = state, rounds

    def note_stripe(self, member: Member, round_: Round | None) -> None:
        """The member holds what the round brings; it may have held it before."""
        if round_ is not None and round_.parts.get(member.name) in (Part.OFFERED, Part.RECEIVING):
            self._rounds.set_part(round_, member.name, Part.VERIFIED)

    def note_verified(self, member: Member, round_: Round | None, number: int, path: str, now: float) -> None:
        """The member holds all of version `number`; others of its node may map it as `path`."""
        if round_ is not None and round_.parts.get(member.name) is Part.RECEIVING:
            self.note_stripe(member, round_)
            member.last_round_s = now - round_.started
            member.note_arrival(round_)
            if not round_.is_direct:
                way = "bytes_mapped" if round_.is_mapped else "bytes_copied"
                self._state.counters[way] += self._state.num_bytes
        # Also if its round is over: it holds these bytes. Those that it maps are not kept for differences.
        is_own = round_ is None or not (round_.is_mapped or round_.is_direct)
        member.base = number if is_own else UNLOADED
        member.direct_base = number if round_ is not None and round_.is_direct else UNLOADED
        if path:
            member.shared, member.shared_path = number, path

    def note_failed(self, member: Member, round_: Round, cause: str, num_buckets: int, now: float) -> None:
        """The member could not accept, receive, map or verify."""
        if round_.parts.get(member.name) not in OPEN_PARTS:
            return
        if round_.is_mapped:
            part = self._rounds.sharing.note_failure(member, round_, cause)
            self._rounds.set_part(round_, member.name, part)
            return
        self._rounds.set_part(round_, member.name, Part.FAILED)
        round_.causes[member.name] = member.last_error = cause
        member.num_buckets = num_buckets
        if cause == DIGEST:
            member.base = member.direct_base = UNLOADED  # if a difference was wrong, all is sent next
        if cause == TRANSPORT:
            self._rounds.break_up(round_, TRANSPORT, now)

    def note_sent(self, round_: Round, num_bytes: int, now: float) -> None:
        """The publisher has sent all buckets, or stored them in the folder."""
        if round_.sender is Sender.PENDING:
            round_.sender, round_.num_bytes = Sender.SENT, num_bytes
            self._state.counters["bytes_sent"] += num_bytes
            self._rounds.transfers.start_receiving(round_, now)

    def note_send_failed(self, round_: Round, cause: str, begun_s: float, now: float) -> None:
        """The publisher could not send, or answers an abort."""
        if round_.sender is Sender.PENDING:
            self._rounds.fail_to_send(round_, cause, now)
        self._rounds.hear_publisher(round_, math.inf if begun_s < 0 else now - begun_s)


class SilenceCheck:
    """Looks for members that are silent, or dead; see the module."""

    def __init__(self, state: CoordinationState, rounds: RoundManager) -> None:
        self._state, self._rounds = state, rounds
        self._look_at = -math.inf

    def look(self, now: float) -> None:
        """Blame silent members, and give up those that are dead."""
        if now < self._look_at:
            return
        for member in self._state.members.values():
            if member.is_listening:
                self._check_silence(member, now)
        timing = self._state.timing
        due = [
            member.last_seen + (timing.silence_s if member.may_fall_silent else timing.dead_s)
            for member in self._state.members.values()
            if member.is_listening
        ]
        self._look_at = min([now + timing.silence_s, *due]) - SLACK_S  # who is heard later is later silent

    def _check_silence(self, member: Member, now: float) -> None:
        if now - member.last_seen >= self._state.timing.dead_s:
            self._rounds.leave(member, now)
            member.move(MemberState.DEAD)
            self._state.forget_progress(member)
            member.is_attended = False
            self._rounds.groups.forget(member.name)
        is_silent = member.may_fall_silent and self._state.is_silent(member.last_seen, now)
        if is_silent and not self._rounds.is_awaited(member):  # else its round judges
            self._state.blame(member, SILENT)
