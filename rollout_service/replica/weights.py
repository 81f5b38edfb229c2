"""Weights of a replica: versions that its receiver has staged are swapped in as they come.

sync loop    consumes: staged versions    waits for: the receiver, wait_s, a running evaluation
             produces: swaps and their reports
"""

from __future__ import annotations

import asyncio
import logging

from asyncrl.core.errors import AsyncrlError, EngineError
from asyncrl.core.obstacle import Cause, FailureStreak
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.staleness import UNLOADED
from rollout_service.engine.protocol import EngineDied
from rollout_service.replica.lifecycle import Lifecycle
from rollout_service.replica.parts import ReplicaParts
from rollout_service.replica.states import State
from weight_sync.memory.staging import Staged

log = logging.getLogger(__name__)

STAGED_WAIT_S = 1.0  # the receiver's answer tells that the replica is fenced


class WeightSwaps:
    """See the module.

    Attributes:
        lock: Held while weights are swapped; who holds it keeps the version.
        failures: Of loads, in a row.
    """

    def __init__(self, parts: ReplicaParts, lifecycle: Lifecycle) -> None:
        self._parts, self._lifecycle = parts, lifecycle
        self.lock = asyncio.Lock()
        self.failures = FailureStreak(Cause.WEIGHTS_REFUSED)

    async def run(self) -> None:
        """Swap in what is staged, until cancelled. Raises EngineDied."""
        engine, weights = self._parts.engine, self._parts.weights
        while True:
            try:
                loaded_number = engine.serving.number if engine.is_loaded else UNLOADED
                staged = await weights.next_staged(loaded_number, STAGED_WAIT_S)
                self._lifecycle.note_change()  # the answer also tells whether this replica is fenced
                if staged is not None:
                    async with self.lock:
                        await self._swap(staged)
            except EngineDied:
                raise  # the replica cannot go on
            except AsyncrlError as error:
                await self._lifecycle.note("sync_errors", error)

    async def _swap(self, staged: Staged) -> None:
        engine, weights, version = self._parts.engine, self._parts.weights, staged.version
        try:
            await engine.swap(staged)
        except EngineError as error:
            self._lifecycle.move(State.SYNCING)
            self.failures.fail(str(error))
            await weights.report_loaded(version.number, ok=False, error=str(error))
            raise
        log.info(
            "serving version %d (step %d), swapped in %.3f s",
            version.number,
            version.step,
            engine.last_swap_s,
        )
        self.failures.succeed()
        self._lifecycle.move(State.READY)
        fault_point("rollout.swapped", version.step)
        await weights.report_loaded(version.number, ok=True)
