"""The parts of a replica as its status tells of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from asyncrl.core.obstacle import Obstacle
from asyncrl.core.service_status import EngineStatus, ReplicaStatus
from rollout_service.engine.metered import BUSY, MeteredEngine
from rollout_service.parts import ReplicaParts


def with_parts(told: ReplicaStatus, parts: ReplicaParts) -> ReplicaStatus:
    """Return the status of a replica with what its parts have to say."""
    return msgspec.structs.replace(
        told,
        version=parts.engine.serving.number,
        step=parts.engine.serving.step,
        child_pids=tuple(_child_pids(parts)),
        engine=_describe(parts.engine),
        reward=parts.reward.status() if parts.reward is not None else None,
        shaping=parts.overlong.status() if parts.overlong is not None else None,
        gateway=parts.gateway.status() if parts.gateway is not None else None,
    )


def obstacles_of(parts: ReplicaParts, *, is_ready: bool) -> Iterator[Obstacle]:
    """Yield what keeps the parts from their work; agents are expected at one that is ready."""
    if parts.reward is not None:
        yield from parts.reward.obstacles()
    if parts.gateway is not None and is_ready:
        yield from parts.gateway.obstacles()


def _describe(engine: MeteredEngine) -> EngineStatus:
    idle = engine.account()
    return EngineStatus(
        in_flight_requests=engine.num_in_flight,
        tokens=engine.num_tokens,
        trajectories=engine.num_completions,
        busy_s=idle.pop(BUSY, 0.0),
        idle_by_cause=idle,
        swaps=engine.num_swaps,
        last_swap_s=engine.last_swap_s,
    )


def _child_pids(parts: ReplicaParts) -> Iterator[int]:
    yield from parts.engine.child_pids()
    if parts.reward is not None:
        yield from parts.reward.child_pids()
