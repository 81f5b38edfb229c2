"""Hellos as the records that the coordinator keeps, and its records as status (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from asyncrl.core.errors import WireError
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.service_status import MemberStatus, RoundStatus
from asyncrl.core.states import ServiceState
from weight_sync.protocol.members import Member, MemberInfo, PublisherInfo
from weight_sync.protocol.messages import Hello
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Round


def members_status(coordination: Coordination, now: float | None = None) -> dict[str, MemberStatus]:
    """Return what is known of each member; how long each was silent only of a time `now`."""
    return {member.name: _member_status(member, now) for member in coordination.members.values()}


def _member_status(member: Member, now: float | None) -> MemberStatus:
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


def obstacles_of(coordination: Coordination) -> Iterator[Obstacle]:
    """Yield the members that the last transfers to them have not reached, and what each said of it."""
    for member in coordination.members.values():
        if member.is_listening and member.num_failures:
            reason = f"a version did not reach it: {member.last_error}"
            yield Obstacle(member.name, Cause.WEIGHTS_UNDELIVERED, reason, member.num_failures)


def rounds_status(coordination: Coordination, now: float) -> Iterator[RoundStatus]:
    """Yield the rounds under way."""
    return (_round_status(round_, now) for round_ in coordination.rounds)


def _round_status(round_: Round, now: float) -> RoundStatus:
    return RoundStatus(
        lane=round_.lane.value,
        phase=round_.phase.value,
        version=round_.version.number,
        membership=round_.membership,
        seconds=round(now - round_.started, 3),
        parts={name: part.value for name, part in round_.parts.items()},
    )


T = TypeVar("T")


def publisher_info_of(hello: Hello, now: float) -> PublisherInfo:
    """Return the publisher that says hello. Raises WireError if it leaves out where receivers meet it."""
    return PublisherInfo(
        hello.incarnation,
        frozenset(hello.abilities),
        _said("store_host", hello.store_host),
        _said("store_port", hello.store_port),
        now,
        born=hello.born,
    )


def member_info_of(hello: Hello) -> MemberInfo:
    """Return what a receiver says of itself. Raises WireError if it leaves out what it holds."""
    return MemberInfo(
        hello.name,
        hello.incarnation,
        frozenset(hello.abilities),
        serving=_said("serving", hello.serving),
        staged=_said("staged", hello.staged),
        is_attended=_said("attended", hello.attended),
        is_pinned=_said("pinned", hello.pinned),
        is_draining=hello.draining,
        born=hello.born,
        base=hello.base,
    )


def _said(name: str, value: T | None) -> T:
    if value is None:
        raise WireError(f"'hello': the field '{name}' is missing")
    return value
