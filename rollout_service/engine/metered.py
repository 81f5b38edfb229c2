"""An engine with a meter: what it generated, and how long it was busy.

Once interrupted it takes no request any more: its replica is leaving, and an episode that was in its tool
must end as those do that were in the engine. Invariant: busy seconds and idle ones by their cause add up to
the time since the meter was made. Busy means that a request is in flight and no swap is going on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asyncrl.core.runtime.clock import Clock
from asyncrl.core.staleness import PolicyVersion
from asyncrl.core.status.replica import CacheStatus
from rollout_service.engine.protocol import Completion, Engine, Interrupted, Sampling
from rollout_service.replica.states import START
from rollout_service.sampling.partial_rollout import NOTHING

if TYPE_CHECKING:
    from weight_sync.memory.staging import Staged

BUSY, SWAP = "busy", "swap"


class MeteredEngine:
    """Passes all calls on to `engine` and counts. See `protocol.Engine`."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._start = self._changed = clock.now()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cause = START
        self._is_swapping = False
        self._is_interrupted = False
        self.num_in_flight = 0
        self.num_tokens = 0
        self.num_completions = 0
        self.num_swaps = 0
        self.last_swap_s = 0.0

    @property
    def serving(self) -> PolicyVersion:
        return self._engine.serving

    @property
    def is_loaded(self) -> bool:
        return self._engine.is_loaded

    @property
    def probe_gap(self) -> float | None:
        return self._engine.probe_gap

    def account(self) -> dict[str, float]:
        """Return seconds by what they went by with: `BUSY`, `SWAP` and what `wait_for` named."""
        seconds = dict(self._seconds)  # a copy first: another thread may book meanwhile
        rest = self._clock.now() - self._start - sum(seconds.values())
        activity = self._activity
        return seconds | {activity: seconds.get(activity, 0.0) + rest}

    def wait_for(self, cause: str) -> None:
        """Say what an engine without a request waits for from here on."""
        self._turn()
        self._cause = cause

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        if self._is_interrupted:
            raise Interrupted(f"request {request_id} came after the end", completion=NOTHING)
        with self.request():
            try:
                completion = await self._engine.generate(prompt_ids, sampling, request_id)
            except Interrupted as error:
                self.num_tokens += len(error.completion.token_ids)
                raise
        self.num_completions += 1
        self.num_tokens += len(completion.token_ids)
        return completion

    async def interrupt(self) -> None:
        self._is_interrupted = True
        await self._engine.interrupt()

    async def swap(self, staged: Staged) -> None:
        start = self._clock.now()
        self._turn()
        self._is_swapping = True
        try:
            await self._engine.swap(staged)
            self.num_swaps += 1
        finally:
            self._turn()
            self._is_swapping = False
            self.last_swap_s = self._clock.now() - start

    def cache_status(self) -> CacheStatus | None:
        return self._engine.cache_status()

    def child_pids(self) -> list[int]:
        return self._engine.child_pids()

    async def shutdown(self) -> None:
        await self._engine.shutdown()

    @property
    def _activity(self) -> str:
        if self._is_swapping:
            return SWAP
        return BUSY if self.num_in_flight else self._cause

    def _turn(self) -> None:
        """Book the time until now; call before anything that `_activity` depends on changes."""
        now = self._clock.now()
        self._seconds[self._activity] += now - self._changed
        self._changed = now

    @contextmanager
    def request(self) -> Iterator[None]:
        """Book a request in flight, also one that was made of the engine's own client."""
        self._turn()
        self.num_in_flight += 1
        try:
            yield
        finally:
            self._turn()
            self.num_in_flight -= 1
