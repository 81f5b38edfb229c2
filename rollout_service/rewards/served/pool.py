"""A function of the user's in a few processes beside the replica, each call with a deadline.

Invariant: a call that raises, hangs or takes its process down fails alone; its process is replaced at the
next call, and the other processes go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from asyncrl.core.errors import ConfigError
from asyncrl.core.states import Reason
from rollout_service.rewards.score import Answer, RewardError, Score, checked_score
from rollout_service.rewards.served.frames import pack_frame
from rollout_service.rewards.served.messages import Judged, PlainAnswer
from rollout_service.rewards.served.processes.child import Child, ChildDied

MODULE = "rollout_service.rewards.served.processes.pool_process"
START_DEADLINE_S = 120.0
WORKERS = 2
DEADLINE_S = 30.0


def plain_answer(answer: Answer) -> PlainAnswer:
    """Return an answer and its task as plain values."""
    prompt = answer.prompt
    content = prompt.content
    return {
        "prompt": content if isinstance(content, str) else [dict(message) for message in content],
        "response": answer.response,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra_info": dict(prompt.extra_info),
        "finish_reason": answer.finish_reason,
        "num_tokens": answer.num_tokens,
        "row": prompt.row,
    }


class PooledReward:
    """A part whose function runs in processes.

    Args:
        function: `file.py:function`, or `module:function` of a registered reward.
        arguments: As of `BoundFunction`.
        workers: Processes at most; a second one is started when the first is busy.
        deadline_s: Of one call, from when a process takes it up.
    """

    def __init__(
        self,
        name: str,
        function: str,
        arguments: Mapping[str, object] | None = None,
        workers: int = WORKERS,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.name = name
        self._settings = {"name": name, "function": function, "arguments": dict(arguments or {})}
        self._deadline_s = deadline_s
        self._free = asyncio.Semaphore(workers)
        self._idle: list[Child] = []
        self._children: set[Child] = set()
        self._calls: set[asyncio.Task[Score]] = set()

    async def start(self) -> None:
        """Start one process. Raises ConfigError if the function cannot be loaded."""
        try:
            self._idle.append(await self._take_child())
        except (ChildDied, TimeoutError) as error:
            raise ConfigError(f"the process of the reward '{self.name}' did not start: {error}") from error

    async def value(self, answer: Answer) -> Score:
        """Return the function's number. Raises RewardError."""
        request = plain_answer(answer)
        try:
            pack_frame(request)
        except ValueError as error:
            message = f"row {answer.prompt.row} cannot be handed to the reward '{self.name}': {error}"
            raise RewardError(message, kind="refused") from error
        await self._free.acquire()
        call = asyncio.create_task(self._call(request))
        self._calls.add(call)
        call.add_done_callback(self._end_call)
        return await asyncio.shield(call)  # whoever gives up leaves the process with its answer to read

    async def close(self) -> None:
        """End the processes."""
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await asyncio.gather(*(child.close() for child in self._children))
        self._children.clear()
        self._idle.clear()

    def child_pids(self) -> list[int]:
        """Return the processes that live."""
        return [child.pid for child in self._children if child.is_alive]

    async def _call(self, request: PlainAnswer) -> Score:
        child = None
        row = request["row"]
        try:
            child = await self._take_child()
            judged = msgspec.convert(await child.ask(request, self._deadline_s), Judged)
        except TimeoutError:
            await self._drop(child)
            message = f"the reward '{self.name}' took longer than {self._deadline_s:g} s (row {row})"
            raise RewardError(message, kind="timeout") from None
        except (ChildDied, ConfigError, ValueError, OSError) as error:
            await self._drop(child)
            message = f"the process of the reward '{self.name}' died (row {row}): {error}"
            raise RewardError(message, kind="died", reason=Reason.REWARD) from error
        except asyncio.CancelledError:
            await self._drop(child)
            raise
        self._idle.append(child)
        if judged.error is not None:
            raise RewardError(judged.error, kind=judged.kind, reason=Reason(judged.reason or Reason.REWARD))
        return checked_score(self.name, {"score": judged.value, "reason": judged.reason})

    async def _take_child(self) -> Child:
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            await self._drop(child)
        child = await Child.start(MODULE, self._settings, START_DEADLINE_S)
        self._children.add(child)
        return child

    async def _drop(self, child: Child | None) -> None:
        if child is not None:
            self._children.discard(child)
            await child.kill()

    def _end_call(self, call: asyncio.Task[Score]) -> None:
        self._free.release()
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # read here: the caller may have given up
