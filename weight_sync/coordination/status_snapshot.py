"""Status snapshot of the coordinator (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.service_status import MemberStatus, RoundStatus
from asyncrl.core.states import ServiceState
from weight_sync.protocol.members import Member
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Round


def picture_members(coordination: Coordination, now: float | None = None) -> dict[str, MemberStatus]:
    """Return what is known of each member; how long each was silent only of a time `now`."""
    return {member.name: _picture_member(member, now) for member in coordination.members.values()}


def _picture_member(member: Member, now: float | None) -> MemberStatus:
    return MemberStatus(
        state=ServiceState(member.state.value),
        version=member.serving,
        staged=member.staged or 0,
        swapping=member.swapping or 0,
        fenced=member.is_fenced,
        pinned=member.is_pinned,
        served_alone=member.is_lone,
        last_round_s=member.last_round_s,
        last_swap_s=member.last_swap_s,
        error=member.last_error,
        silent_s=None if now is None else round(now - member.last_seen, 3),
    )


def picture_obstacles(coordination: Coordination) -> Iterator[Obstacle]:
    """Yield the members that the last transfers to them have not reached, and what each said of it."""
    for member in coordination.members.values():
        if member.is_listening and member.num_failures:
            reason = f"a version did not reach it: {member.last_error}"
            yield Obstacle(member.name, Cause.WEIGHTS_UNDELIVERED, reason, member.num_failures)


def picture_rounds(coordination: Coordination, now: float) -> Iterator[RoundStatus]:
    """Yield the rounds under way."""
    return (_picture_round(round_, now) for round_ in coordination.rounds)


def _picture_round(round_: Round, now: float) -> RoundStatus:
    return RoundStatus(
        lane=round_.lane.value,
        phase=round_.phase.value,
        version=round_.version.number,
        membership=round_.membership,
        seconds=round(now - round_.started, 3),
        parts={name: part.value for name, part in round_.parts.items()},
    )
