"""Failure attribution: who is late, and whether to exclude, isolate for one round, or retry (pure).

Invariant: a member that answered in time is blamed only for an error that it reported of itself, for being
late when others were not, or for failing without others while the publisher is alive.
"""

from __future__ import annotations

import math
from collections import Counter

from weight_sync.protocol.lanes.stripes import PUBLISHER
from weight_sync.protocol.members import Member
from weight_sync.protocol.rounds import (
    ABORTED,
    DEADLINE,
    DIGEST,
    LATE_MAP,
    LEFT,
    OPEN_PARTS,
    OVERDUE,
    PUBLISHER_LOST,
    SILENT,
    STANDS_STILL,
    STORE,
    SUPERSEDED,
    TRANSPORT,
    Part,
    Round,
    Sender,
)
from weight_sync.protocol.state import CoordinationState
from weight_sync.sync_records import RoundRecord

BLAMELESS = (PUBLISHER_LOST, SUPERSEDED, LEFT)
"""Causes of a broken round for which no member is suspected."""
UNEXPLAINED = ("", TRANSPORT, ABORTED)
"""Causes reported by a member that suffers from the fault of another member or the publisher."""
SLACK_S = 1e-6
"""A time of silence is looked at so much earlier, as sums of times are rounded."""


class FailureAttribution:
    """See the module."""

    def __init__(self, state: CoordinationState) -> None:
        self._state = state

    def judge(self, round_: Round, now: float) -> None:
        """Decide about the members of a round that has ended, and put it on record.

        A member that reported that it could not map a copy is not blamed: a transfer of the version follows.
        """
        failed = [self._state.members[name] for name in round_.those(Part.FAILED) if not round_.is_mapped]
        explained = [member for member in failed if self._cause_of(member, round_) not in UNEXPLAINED]
        if round_.is_direct:
            self._leave_direct_path(failed, round_)
        else:
            self._judge_explained(explained, round_, now)
            self._judge_rest([member for member in failed if member not in explained], round_, now)
        self._count(round_)
        self._state.note(_record(round_, now))

    def _leave_direct_path(self, members: list[Member], round_: Round) -> None:
        """Have the members of a failed direct round get the version staged; none of them is blamed."""
        for member in members:
            member.leave_direct_path(round_.version.number, is_blameless=round_.broken_by in BLAMELESS)
        self._state.counters["direct_fallbacks"] += len(members)

    def lateness_of(self, round_: Round, name: str, now: float) -> str | None:
        """Return the cause for which a member is not waited for any longer; None if it is."""
        is_asked = round_.parts[name] is Part.OFFERED or round_.is_mapped
        if is_asked and now >= round_.until:
            return LATE_MAP if round_.is_mapped else "no answer to the offer"
        if is_asked and self.stands_still(round_, now, name):
            return STANDS_STILL
        return SILENT if self._state.is_silent(self._state.members[name].last_seen, now) else None

    def stands_still(self, round_: Round, now: float, *names: str) -> bool:
        """Tell whether none of `names` has made progress for too long."""
        return now - round_.moved_at(*names) >= self._state.deadlines(round_.lane).stall_s

    def note_heard(self, round_: Round) -> None:
        """Work out until when nobody who is waited for is silent, or stands still, for too long."""
        heard = (self._state.members[name].last_seen for name in round_.those(*OPEN_PARTS))
        silent_at = min(heard, default=math.inf) + self._state.timing.silence_s
        apart, together = round_.those(Part.OFFERED), round_.those(Part.RECEIVING)
        if round_.is_mapped:
            apart, together = together, []
        moved = [*map(round_.moved_at, apart), *([round_.moved_at(*together)] if together else [])]
        stall_s = self._state.deadlines(round_.lane).stall_s
        round_.look_at = min(silent_at, min(moved, default=math.inf) + stall_s) - SLACK_S

    def _judge_explained(self, members: list[Member], round_: Round, now: float) -> None:
        """Blame members that reported a cause; if the bytes are wrong for all, blame the publisher."""
        causes = {self._cause_of(member, round_) for member in members}
        is_everyone = len(members) > 1 and len(members) == len(round_.receivers)
        if is_everyone and causes == {DIGEST}:
            cause = "the bytes of every member differ from the digests"
            self._state.blame_publisher(round_.stripe, cause, round_)
        for member in members:
            if not (is_everyone and causes == {DIGEST}):
                self._state.blame(member, self._cause_of(member, round_), round_)
            self._state.back_off(member, now)

    def _judge_rest(self, members: list[Member], round_: Round, now: float) -> None:
        """Blame among members that answered without a cause."""
        if round_.broken_by.startswith(STORE):  # the publisher could not store it, and is blamed for it
            for member in members:
                member.last_error = round_.broken_by
                self._state.back_off(member, now)
        if not members or round_.culprits or round_.broken_by in BLAMELESS:
            return
        if len(round_.parts) == 1:
            self._state.blame(members[0], f"{round_.broken_by or 'a failure'} without others", round_)
            self._state.back_off(members[0], now)
            members[0].part_from_others()
        elif round_.broken_by in OVERDUE and round_.sender is Sender.SENT and round_.those(Part.VERIFIED):
            for member in members:
                self._state.blame(member, "late: all was sent, others were done", round_)
                member.part_from_others()
        else:  # one of them, or none; those that came furthest go on together, and faster
            members.sort(key=lambda member: -member.num_buckets)
            for member in members[len(members) // 2 :]:
                member.part_from_others()

    def _cause_of(self, member: Member, round_: Round) -> str:
        return round_.causes.get(member.name, "")

    def _count(self, round_: Round) -> None:
        if round_.is_broken or round_.those(Part.FAILED, Part.LEFT_OUT):
            causes = Counter(_kind(cause) for cause in set(round_.causes.values()))
            for kind in sorted(causes or {DEADLINE: 1}):
                self._state.counters[f"rounds_failed/{kind}"] += 1


def _kind(cause: str) -> str:
    """Return the cause without details of one member: `refused: no room ...` is `refused`."""
    return cause.partition(":")[0].replace(" ", "_")


def _record(round_: Round, now: float) -> RoundRecord:
    is_failed = round_.is_broken or bool(round_.those(Part.FAILED, Part.LEFT_OUT))
    causes = {name: cause for name, cause in round_.causes.items() if name != PUBLISHER}
    first = next(iter(causes.values()), "")
    return RoundRecord(
        round=round_.id,
        lane=round_.lane.value,
        number=round_.version.number,
        step=round_.version.step,
        membership=round_.membership,
        parts={name: part.value for name, part in round_.parts.items()},
        seconds=now - round_.started,
        num_bytes=round_.num_bytes,
        cause=(round_.broken_by or first) if is_failed else "",
        causes=causes,
        culprits=list(round_.culprits),
        holder=round_.holder,
        stripe=round_.stripe.index,
    )
