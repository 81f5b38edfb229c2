"""The composition root of the coordinator, which holds no data: nothing here imports torch (2.5 s)."""

from __future__ import annotations

from asyncrl.core.service import ServiceContext
from weight_sync.bounds import bounds_of
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.coordination.journal import read_fences, take_token
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Timing


def build_coordinator(context: ServiceContext, timing: Timing | None = None) -> CoordinatorService:
    """Return the coordinator; it starts before the others, which find it as `weight_sync.0`."""
    section = context.config.weight_sync
    token = take_token(context.run_dir, context.runtime.wall_ns)  # first, see `read_fences`
    coordination = Coordination(
        timing or Timing.of(section.deadline_s),
        parallelism=section.parallelism,
        token=token,
        uses_delta=section.uses_delta,
        fences=read_fences(context.run_dir),
        max_unavailable=section.max_unavailable,
        uses_direct=section.is_direct,
    )
    bounds = bounds_of(context.config)
    place = (context.bind, context.server_keys, context.run_dir)
    return CoordinatorService(coordination, context.runtime, *place, bounds)
