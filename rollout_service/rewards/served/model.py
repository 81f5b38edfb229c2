"""A reward model in a process beside the replica: one of Hugging Face's sequence classifiers, in batches.

The process is the replica's own, so it grows, drains and dies with it. Invariant: one batch at a time; a
batch that hangs or kills the process fails its own answers, and the next one starts a new process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import msgspec

from asyncrl.core.errors import ConfigError
from rollout_service.rewards.score import Answer, Fault, RewardError, Score
from rollout_service.rewards.served.batches import Batches, Outcome
from rollout_service.rewards.served.frames import pack_frame
from rollout_service.rewards.served.messages import Batch, BatchScores, ModelItem, ModelSettings
from rollout_service.rewards.served.pool import plain_answer
from rollout_service.rewards.served.processes.child import Child, ChildDied

MODULE = "rollout_service.rewards.served.processes.model_process"
START_DEADLINE_S = 300.0
WAIT_S = 0.005


class ModelReward:
    """A part that a model computes.

    Args:
        batch: Answers at once.
        deadline_s: Of one batch, from when the model takes it up.
    """

    def __init__(self, name: str, settings: ModelSettings, batch: int = 16, deadline_s: float = 60.0) -> None:
        self.name = name
        self._settings = settings
        self._deadline_s = deadline_s
        self._child: Child | None = None
        self._batches = Batches(self._run, batch, WAIT_S, 1)

    async def start(self) -> None:
        """Load the model. Raises ConfigError if it cannot be used."""
        try:
            self._child = await Child.start(MODULE, asdict(self._settings), START_DEADLINE_S)
        except (ChildDied, TimeoutError) as error:
            raise ConfigError(f"the model of the reward '{self.name}' did not start: {error}") from error

    async def value(self, answer: Answer) -> Score:
        """Return the model's number. Raises RewardError."""
        item = text_of(answer)
        try:
            pack_frame(item)
        except ValueError as error:  # alone: its batch would fail with it
            message = f"row {answer.prompt.row} cannot be handed to the reward '{self.name}': {error}"
            raise RewardError(message, kind="refused") from error
        return await self._batches.value(item)

    async def close(self) -> None:
        """End the process."""
        await self._batches.close()
        if self._child is not None:
            await self._child.close()

    def child_pids(self) -> list[int]:
        """Return the process, while it lives."""
        return [self._child.pid] if self._child is not None and self._child.is_alive else []

    async def _run(self, items: Sequence[ModelItem]) -> Sequence[Outcome]:
        try:
            if self._child is None or not self._child.is_alive:
                if self._child is not None:
                    await self._child.kill()  # what it started may live
                await self.start()
            assert self._child is not None, "it was just started"
            reply = await self._child.ask(Batch(items=list(items)), self._deadline_s)
            scores = msgspec.convert(reply, BatchScores).scores
        except (ChildDied, ConfigError, TimeoutError, ValueError) as error:
            if self._child is not None:
                await self._child.kill()
            kind = "timeout" if isinstance(error, TimeoutError) else "died"
            said = f"no answer after {self._deadline_s:g} s" if kind == "timeout" else str(error)
            message = f"the model of the reward '{self.name}': {said}"
            raise RewardError(message, kind="timeout" if kind == "timeout" else "died") from error
        return [self._outcome(item, said) for item, said in zip(items, scores, strict=True)]

    def _outcome(self, item: ModelItem, said: float | tuple[Fault, str]) -> Outcome:
        if isinstance(said, float):
            return Score(said)
        kind, what = said
        return RewardError(f"the reward '{self.name}' (row {item['row']}): {what}", kind=kind)


def text_of(answer: Answer) -> ModelItem:
    """Return what the model reads: prompt and response."""
    told = plain_answer(answer)
    return ModelItem(prompt=told["prompt"], response=told["response"], row=told["row"])
