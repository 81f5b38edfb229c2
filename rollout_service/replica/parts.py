"""Parts of a replica, and the limits of each.

Owns no behaviour. Invariant: everything that a replica needs of others stands here as one struct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncrl.buffer.client import ReplicaClient
from rollout_service.data.prompts import PromptSet
from rollout_service.engine.metered import MeteredEngine
from rollout_service.evaluation.evaluator import Evaluator
from rollout_service.gateway.gateway import Gateway
from rollout_service.gateway.sessions import SessionManager
from rollout_service.rewards.shaping import Overlong
from rollout_service.rewards.total import TotalReward
from rollout_service.sampling.groups import GroupRunner
from weight_sync.memory.staging import Staged


class WeightLink(Protocol):
    """The receiver beside this replica. `is_fenced`: no leases until the replica has caught up."""

    is_fenced: bool

    async def next_staged(self, serving_number: int, wait_s: float) -> Staged | None: ...

    async def report_loaded(self, number: int, ok: bool, error: str = "") -> None: ...

    async def pin(self) -> None: ...

    async def unpin(self) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ReplicaSettings:
    """Limits of a replica, and the handling of its leases.

    Attributes:
        max_groups: Groups in flight with all of their samples; samples that have ended make room.
        lease_s: Lease time; see `asyncrl.buffer.rules.replica.renewal_interval_s`.
        start_deadline_s: Time limit of the buffer's first answer.
        resumes_partial: A drain hands the tokens of unfinished groups back, for another replica.
        records_turns: Episodes record their turns at the buffer instead, as they finish them.
    """

    max_groups: int
    lease_s: float
    start_deadline_s: float
    resumes_partial: bool = False
    records_turns: bool = False


@dataclass(frozen=True)
class ReplicaParts:
    """Parts of a replica; made in `run`, because loading takes time."""

    engine: MeteredEngine
    buffer: ReplicaClient
    weights: WeightLink
    runner: GroupRunner | SessionManager
    evaluator: Evaluator | None
    prompts: PromptSet
    overlong: Overlong | None = None
    reward: TotalReward | None = None
    gateway: Gateway | None = None
