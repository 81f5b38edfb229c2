"""Swaps and interruptions of an engine that keeps its requests itself, with those in flight.

Owns the order of a swap (pause, load, resume) and the requests that run. Invariants: a swap that has begun is
never left half way; a failed load leaves generation paused until a swap works, a failed pause does not.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from asyncrl.core.errors import EngineError
from asyncrl.core.staleness import UNLOADED, PolicyVersion
from asyncrl.core.status.replica import CacheStatus
from rollout_service.engine.protocol import EngineDied

if TYPE_CHECKING:
    from weight_sync.memory.staging import Staged

CONTROL_DEADLINE_S = 60.0
LOAD_BYTES_PER_S = 0.5e9
"""The slowest load that is waited for, beside that: a worker reads pageable memory at 3e9 or more."""
RequestId = TypeVar("RequestId", int, str)


class InFlightEngine(ABC, Generic[RequestId]):
    """The part of an `Engine` that no library has of its own. See `protocol.Engine`.

    Attributes:
        LIBRARY: Its name in errors. ABORT_EVERY_S: Between two aborts of requests that do not end.
    """

    LIBRARY: ClassVar[str]
    ABORT_EVERY_S: ClassVar[float]

    def __init__(self) -> None:
        self._serving = PolicyVersion(UNLOADED, 0)
        self._is_loaded = False
        self._probe_gap: float | None = None
        self._swap_lock = asyncio.Lock()
        self._running: set[RequestId] = set()

    @property
    def serving(self) -> PolicyVersion:
        return self._serving

    @property
    def is_loaded(self) -> bool:
        return self._is_loaded

    @property
    def probe_gap(self) -> float | None:
        return self._probe_gap

    def cache_status(self) -> CacheStatus | None:
        """Return nothing: the library tells no figures of its KV cache."""
        return None

    async def interrupt(self) -> None:
        """End the requests in flight: an aborted one is answered with its tokens, log-probs and versions.

        Raises:
            EngineError: They did not end in time.
        """
        ended = set(self._running)
        try:
            async with asyncio.timeout(CONTROL_DEADLINE_S):
                while left := ended & self._running:  # again for one that the library had not taken in yet
                    await self._abort(sorted(left))
                    await asyncio.sleep(self.ABORT_EVERY_S)
        except TimeoutError as error:
            raise EngineError(f"{self.LIBRARY} did not end {len(left)} requests in time") from error

    async def swap(self, staged: Staged) -> None:
        """Load `staged` with requests in flight, and label what follows with its number.

        A swap that has begun is never left half way: cancelled, it is finished first.

        Raises:
            EngineError: The load failed, or the probe did not match; generation stays paused until a swap
            works. Where already the pause failed nothing was overwritten, and generation goes on.
        """
        swap = asyncio.create_task(self._swap(staged))
        try:
            await asyncio.shield(swap)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):
                await swap
            raise

    async def _swap(self, staged: Staged) -> None:
        async with self._swap_lock:
            await self._pause_or_go_on()
            self._is_loaded = False
            await self._load(staged)
            self._serving = staged.version
            await self._resume()
            self._is_loaded = True

    async def _pause_or_go_on(self) -> None:
        try:
            await self._pause()
        except EngineDied:
            raise
        except EngineError:
            if self._is_loaded:
                self._is_loaded = False
                await self._resume()
                self._is_loaded = True
            raise

    @abstractmethod
    async def _pause(self) -> None:
        """Hold generation; requests stay in flight. Each of these raises EngineError, within a deadline."""

    @abstractmethod
    async def _load(self, staged: Staged) -> None:
        """Load the version, and label what is sampled from then on with its number."""

    @abstractmethod
    async def _resume(self) -> None:
        """Go on with generation."""

    @abstractmethod
    async def _abort(self, requests: list[RequestId]) -> None:
        """Have the library end requests; those that it does not know are left out."""
