"""Batcher of calls: those that arrive within a few milliseconds go together, up to a number.

Invariant: every call gets the answer of its own place in its batch, or an error. It waits for as long as
the batches before it take: a deadline is of a batch, and `run` keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from rollout_service.rewards.score import RewardError, Score

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Outcome = Score | RewardError


class Batches(Generic[Item]):
    """Calls of one reward on their way.

    Args:
        run: Scores a batch, one outcome per item; may raise RewardError for the whole of it. It must end.
        max_items: Of a batch.
        wait_s: Time that the first item of a batch waits for others.
        max_running: Batches at once.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]],
        max_items: int,
        wait_s: float,
        max_running: int,
    ) -> None:
        self._run = run
        self._max_items = max_items
        self._wait_s = wait_s
        self._free = asyncio.Semaphore(max_running)
        self._waiting: list[tuple[Item, asyncio.Future[Score]]] = []
        self._collecting: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def value(self, item: Item) -> Score:
        """Return the item's number. Raises RewardError."""
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect())
        return await future

    async def close(self) -> None:
        """End what is under way; its calls fail."""
        tasks = [*self._running, *([self._collecting] if self._collecting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, future in self._waiting:
            future.cancel()

    async def _collect(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._max_items:
                await asyncio.sleep(self._wait_s)
            await self._free.acquire()
            wanted = [(item, future) for item, future in self._waiting if not future.done()]
            batch, self._waiting = wanted[: self._max_items], wanted[self._max_items :]
            task = asyncio.create_task(self._run_batch(batch))
            self._running.add(task)
            task.add_done_callback(self._end_batch)

    def _end_batch(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._free.release()

    async def _run_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Score]]]) -> None:
        if not batch:
            return
        outcomes: Sequence[Outcome]
        try:
            outcomes = await self._run([item for item, _ in batch])
        except RewardError as error:
            outcomes = [error] * len(batch)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # task boundary: the callers wait for this task alone
            log.exception("a batch of a reward failed")
            outcomes = [RewardError(f"{type(error).__name__}: {error}", kind="died")] * len(batch)
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue  # its caller gave up
            if isinstance(outcome, RewardError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
