"""Episodes: one run of an environment from a prompt to a scored trajectory.

`Environment` is the seam: a single turn today, several turns with tools behind the same call later
(their observation tokens get loss mask 0).

Shapes: T response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from asyncrl.experience import Trajectory
from rollout_service.engine.protocol import Completion, Engine, Sampling
from rollout_service.prompts import TokenizedPrompt
from rollout_service.rewards.registry import Answer, Reward
from rollout_service.rewards.shaping import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Environment(Protocol):
    """Turns a prompt into a trajectory."""

    async def run(self, prompt: TokenizedPrompt, sampling: Sampling, episode_id: str) -> Trajectory:
        """Run one episode. Raises AsyncrlError if it cannot be trained on."""


class SingleTurn:
    """One prompt, one response, one reward, which `overlong` may lower."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        reward: Reward,
        overlong: Overlong | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._reward = reward
        self._overlong = overlong

    async def run(self, prompt: TokenizedPrompt, sampling: Sampling, episode_id: str) -> Trajectory:
        """Sample a response, score it and return the trajectory. Raises EngineError, RewardError."""
        completion = await self._engine.generate(prompt.token_ids.tolist(), sampling, episode_id)
        reward = await self._reward.score(self._answer(prompt, completion))
        if self._overlong is not None:
            reward = self._overlong.shape(reward, len(completion.token_ids))
        return Trajectory(
            response_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), dtype=np.uint8),
            logprobs=completion.logprobs,
            spans=completion.spans,
            reward=reward,
            finish_reason=completion.finish_reason,
        )

    def _answer(self, prompt: TokenizedPrompt, completion: Completion) -> Answer:
        response = self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return Answer(prompt.prompt, response, completion.finish_reason, len(completion.token_ids))
