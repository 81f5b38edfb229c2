"""Records of the coordinator: its publisher from a hello, its members and rounds as status (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.core.errors import WireError
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import MemberStatus, RoundStatus
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.protocol.members import Member, PublisherInfo
from weight_sync.protocol.messages import PublisherHello
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
        mapped_from=member.mapped_from,
        silent_s=None if now is None else round(now - member.last_seen, 3),
    )


def obstacles_of(coordination: Coordination) -> Iterator[Obstacle]:
    """Yield publishers that disagree on the stripes, and members that the last transfers did not reach."""
    counts = {name: one.stripe.count for name, one in sorted(coordination.publishers.items())}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} says {count}" for name, count in counts.items())
        reason = f"no version is sent: publishers disagree on how many there are: {told}; start the run again"
        yield Obstacle("", Cause.WEIGHTS_UNDELIVERED, reason)
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
        holder=round_.holder,
    )


def publisher_info_of(hello: PublisherHello, now: float) -> PublisherInfo:
    """Return the publisher that says hello.

    Raises:
        WireError: Its name is not that of its stripe's publisher.
    """
    stripe = Stripe(hello.stripe, hello.num_stripes)
    if hello.stripe >= hello.num_stripes or hello.name != stripe.publisher:
        raise WireError(f"{hello.name} says that it sends stripe {hello.stripe} of {hello.num_stripes}")
    return PublisherInfo(
        hello.incarnation,
        hello.store_host,
        hello.store_port,
        now,
        started_ms=hello.started_ms,
        folder=hello.folder,
        node=hello.node,
        seats=hello.seats,
        path=hello.path,
        stripe=stripe,
    )
