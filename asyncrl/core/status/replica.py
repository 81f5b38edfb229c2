"""Status of a replica and of its parts: engine, rewards, gateway (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.core.rpc.message import Message
from asyncrl.core.status.service import ServiceStatus


class CacheStatus(Message, frozen=True):
    """KV cache of an engine: counts since the start, the share in use, requests in its batch and waiting."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    usage: float = 0.0
    running: int = 0
    waiting: int = 0


class EngineStatus(Message, frozen=True, kw_only=True):
    """Status of an engine.

    Attributes:
        tokens, trajectories: Generated since the start.
        busy_s, idle_by_cause: Seconds since the start.
        last_swap_s: Duration of the last change of weights.
        probe_gap: Mean |engine - learner| log-prob of the last probe, in nats; None without one.
        cache: None where the engine tells nothing of its cache.
    """

    in_flight_requests: int
    tokens: int
    trajectories: int
    busy_s: float
    idle_by_cause: Mapping[str, float]
    swaps: int
    last_swap_s: float
    probe_gap: float | None = None
    cache: CacheStatus | None = None

    @property
    def idle_s(self) -> float:
        """Seconds without work since the start, for any cause."""
        return sum(self.idle_by_cause.values())

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return self.busy_s + self.idle_s


class LimitStatus(Message, frozen=True):
    """Limit of a replica's unfinished samples, its bound, and why it last moved: none, grow, trim or cut."""

    places: int
    bound: int
    change: str


class RewardStatus(Message, frozen=True):
    """Since the start: each part's (count, sum), failures by kind, answers by data source and outcome."""

    parts: Mapping[str, tuple[int, float]] = {}
    errors: Mapping[str, int] = {}
    sources: Mapping[str, Mapping[str, int]] = {}


class ShapingStatus(Message, frozen=True):
    """Since the start: answers scored, those that were overlong, and the sum of what that took off."""

    scored: int = 0
    overlong: int = 0
    taken_off: float = 0.0


class GatewayStatus(Message, frozen=True):
    """Status of a gateway: its URL, open sessions, counts, and replaced parameters by name."""

    url: str
    sessions: int = 0
    sessions_counted: Mapping[str, int] = {}
    overridden: Mapping[str, int] = {}


class ReplicaStatus(ServiceStatus, frozen=True, kw_only=True):
    """Status of a replica.

    Attributes:
        version, step: Of the weights that it serves; 0 before the first.
        standby: It follows the weights and takes no leases.
        child_pids: Processes that die with it.
        limit, engine: None until they are built; so are the others, and where the run has none.
    """

    version: int
    step: int
    standby: bool
    in_flight_groups: int
    counters: Mapping[str, int]
    child_pids: tuple[int, ...] = ()
    limit: LimitStatus | None = None
    engine: EngineStatus | None = None
    reward: RewardStatus | None = None
    shaping: ShapingStatus | None = None
    gateway: GatewayStatus | None = None
