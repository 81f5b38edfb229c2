"""Evaluation: held-out prompts, answered several times each, at one version, with fixed seeds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.buffer.ledger.orders import evaluation_seed, prompts_of_part
from asyncrl.buffer.messages import EvaluationOrder
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.experience import Trajectory
from asyncrl.core.metrics.tallies import Tally
from rollout_service.data.prompts import TokenizedPrompt
from rollout_service.engine.protocol import EngineDied, Interrupted, Sampling
from rollout_service.evaluation.statistics import Judged, JudgedPrompt, name_sources, tally_prompts
from rollout_service.sampling.episode import EpisodeRunner

T = TypeVar("T")

RIGHT = 1.0
"""A reward from here on counts as a right answer; of several rewards, the first one before its weight."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Sampling of the held-out prompts; seeds follow from the run, the prompt and the sample.

    At most `max_at_once` answers are under way: what environments share must not queue for long.
    """

    temperature: float
    max_tokens: int
    run_seed: int
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    max_at_once: int = 256


class Evaluator:
    """Answers the held-out prompts. The caller keeps the engine at one version meanwhile.

    Args:
        state_answer: Returns what an answer says in short, see `answers`.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        prompts: Sequence[TokenizedPrompt],
        settings: EvaluationSettings,
        state_answer: Callable[[Trajectory], str | None],
    ) -> None:
        self._runner = runner
        self._prompts = tuple(prompts)
        self._settings = settings
        self._state_answer = state_answer
        self._names = name_sources(one.prompt.data_source for one in prompts)

    async def run(self, order: EvaluationOrder) -> dict[str, Tally]:
        """Return the tallies of one part of an evaluation, see `statistics`.

        Raises:
            EngineDied, Interrupted: The engine is gone or is leaving; any other failure makes a wrong answer.
        """
        mine = prompts_of_part(len(self._prompts), order.part, order.num_parts)
        prompts = [self._prompts[place] for place in mine]
        num_samples = self._settings.num_samples
        places = asyncio.Semaphore(self._settings.max_at_once)
        asked = itertools.product(prompts, range(num_samples))
        answers = await _gather_all(
            [self._place(places, order.id, prompt, sample) for prompt, sample in asked]
        )
        judged = [
            JudgedPrompt(
                prompt.prompt.data_source, tuple(answers[place * num_samples : (place + 1) * num_samples])
            )
            for place, prompt in enumerate(prompts)
        ]
        return tally_prompts(judged, num_samples, self._names)

    async def _place(
        self, places: asyncio.Semaphore, evaluation: int, prompt: TokenizedPrompt, sample: int
    ) -> Judged | None:
        async with places:
            return await self._sample(evaluation, prompt, sample)

    async def _sample(self, evaluation: int, prompt: TokenizedPrompt, sample: int) -> Judged | None:
        settings = self._settings
        seed = evaluation_seed(settings.run_seed, prompt.index, sample)
        sampling = Sampling(settings.temperature, settings.max_tokens, seed, stop=settings.stop)
        episode_id = f"evaluation.{evaluation}.{prompt.index}.{sample}"
        try:
            trajectory = await self._runner.run(prompt, sampling, episode_id)
        except (EngineDied, Interrupted):
            raise
        except AsyncrlError:
            return None  # counted as `num_failed`
        parts = list(trajectory.reward_parts.values())
        return Judged(
            is_right=(parts[0] if parts else trajectory.reward) >= RIGHT,
            reward=trajectory.reward,
            answer=self._state_answer(trajectory),
            num_tokens=trajectory.num_tokens,
            is_cut=trajectory.finish_reason == "length",
        )


async def _gather_all(calls: Sequence[Coroutine[object, None, T]]) -> list[T]:
    """Return all results; the first failure ends the other calls, and is raised once they have ended."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
