"""Evaluation: the held-out prompts, once each, at one version, with fixed seeds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.errors import EngineError
from asyncrl.experience import Trajectory
from rollout_service.engine.protocol import EngineDied, Sampling
from rollout_service.episode import Environment
from rollout_service.prompts import TokenizedPrompt
from rollout_service.rewards.registry import RewardError

RIGHT = 1.0
"""A reward from here on counts as a right answer."""
NO_TICKET = 0
"""Tickets count from 1, so the seeds of ticket 0 are free for evaluations."""


@dataclass(frozen=True)
class EvaluationSettings:
    """How the held-out prompts are answered; seeds follow from the run and the prompt."""

    temperature: float
    max_tokens: int
    run_seed: int


class Evaluator:
    """Answers the held-out prompts. The caller keeps the engine at one version meanwhile."""

    def __init__(
        self, environment: Environment, prompts: tuple[TokenizedPrompt, ...], settings: EvaluationSettings
    ) -> None:
        self._environment = environment
        self._prompts = prompts
        self._settings = settings

    async def run(self, evaluation: int) -> dict[str, float]:
        """Return the metrics of one evaluation; an answer that cannot be scored counts as wrong."""
        answers = await asyncio.gather(*(self._answer(evaluation, prompt) for prompt in self._prompts))
        scored = [answer for answer in answers if answer is not None]
        num_prompts = len(self._prompts)
        return {
            "accuracy": sum(answer.reward >= RIGHT for answer in scored) / num_prompts,
            "reward_mean": sum(answer.reward for answer in scored) / num_prompts,
            "response_tokens_mean": sum(answer.num_tokens for answer in scored) / max(1, len(scored)),
            "cut_share": sum(answer.finish_reason == "length" for answer in scored) / num_prompts,
            "num_prompts": float(num_prompts),
            "num_failed": float(num_prompts - len(scored)),
        }

    async def _answer(self, evaluation: int, prompt: TokenizedPrompt) -> Trajectory | None:
        settings = self._settings
        seed = sample_seed(settings.run_seed, NO_TICKET, prompt.index)
        sampling = Sampling(settings.temperature, settings.max_tokens, seed)
        try:
            return await self._environment.run(prompt, sampling, f"evaluation.{evaluation}.{prompt.index}")
        except EngineDied:
            raise
        except (EngineError, RewardError):
            return None  # counted as `num_failed`
