"""Status snapshot of the coordinator, as plain values (pure)."""

from __future__ import annotations

from typing import Any

from asyncrl.obstacle import Cause, Obstacle
from weight_sync.protocol.members import Member
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Round


def picture_members(coordination: Coordination) -> dict[str, dict[str, Any]]:
    """Return what is known of each member; times in seconds."""
    return {member.name: _picture_member(member) for member in coordination.members.values()}


def _picture_member(member: Member) -> dict[str, Any]:
    return {
        "state": member.state.value,
        "version": member.serving,
        "staged": member.staged or 0,
        "swapping": member.swapping or 0,
        "fenced": member.is_fenced,
        "pinned": member.is_pinned,
        "served_alone": member.is_lone,
        "last_round_s": member.last_round_s,
        "last_swap_s": member.last_swap_s,
        "error": member.last_error,
    }


def picture_obstacles(coordination: Coordination) -> list[dict[str, Any]]:
    """Return the members that the last transfers to them have not reached, and what each said of it."""
    unreached = [one for one in coordination.members.values() if one.is_listening and one.num_failures]
    return [_picture_unreached(member).as_values() for member in unreached]


def _picture_unreached(member: Member) -> Obstacle:
    reason = f"a version did not reach it: {member.last_error}"
    return Obstacle(member.name, Cause.WEIGHTS_UNDELIVERED, reason, member.num_failures)


def picture_rounds(coordination: Coordination, now: float) -> list[dict[str, Any]]:
    """Return the rounds under way."""
    return [_picture_round(round_, now) for round_ in coordination.rounds]


def _picture_round(round_: Round, now: float) -> dict[str, Any]:
    return {
        "lane": round_.lane.value,
        "phase": round_.phase.value,
        "version": round_.version.number,
        "membership": round_.membership,
        "seconds": round(now - round_.started, 3),
        "parts": {name: part.value for name, part in round_.parts.items()},
    }
