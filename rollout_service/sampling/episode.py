"""Episodes: one run from a prompt to a scored trajectory.

`EpisodeRunner` is the seam: a single turn here, several turns with tools and environments behind the same
call (`rollout_service.environments`; their observation tokens get loss mask 0).

Shapes: T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from asyncrl.core.experience import Trajectory
from asyncrl.core.experts import split
from rollout_service.data.prompts import TokenizedPrompt
from rollout_service.engine.protocol import Completion, Engine, Interrupted, Sampling
from rollout_service.rewards.score import Answer, Reward
from rollout_service.rewards.shaping import Overlong
from rollout_service.sampling import partial_rollout
from rollout_service.sampling.turn_journal import EpisodeRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Unfinished(Interrupted):
    """The episode was interrupted, and a later attempt may go on from its `completion`."""

    @property
    def trajectory(self) -> Trajectory:
        """The beginning as a trajectory."""
        return partial_rollout.as_unfinished(self.completion)


class EpisodeRunner(Protocol):
    """Turns a prompt into a trajectory."""

    async def run(
        self,
        prompt: TokenizedPrompt,
        sampling: Sampling,
        episode_id: str,
        partial: Trajectory | EpisodeRecord | None = None,
    ) -> Trajectory:
        """Run one episode.

        Args:
            partial: Its beginning by an earlier attempt, or where it records its turns. A runner may begin
                anew all the same.

        Raises:
            AsyncrlError: It cannot be trained on.
            Unfinished: The engine was interrupted, and there is a beginning to go on from; any other
                `Interrupted` says that there is none.
        """


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

    async def run(
        self,
        prompt: TokenizedPrompt,
        sampling: Sampling,
        episode_id: str,
        partial: Trajectory | EpisodeRecord | None = None,
    ) -> Trajectory:
        """Sample a response, score it and return the trajectory. Raises EngineError, RewardError."""
        assert not isinstance(partial, EpisodeRecord), "episodes of several turns are recorded"
        completion = await self._complete(prompt, sampling, episode_id, partial)
        score = await self._reward.score(self._answer(prompt, completion))
        reward = score.value
        if self._overlong is not None:
            reward = self._overlong.shape(reward, len(completion.token_ids))
        prompt_experts, experts = split(completion.experts, len(completion.token_ids))
        return Trajectory(
            response_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), dtype=np.uint8),
            logprobs=completion.logprobs,
            spans=completion.spans,
            reward=reward,
            finish_reason=completion.finish_reason,
            reward_parts=score.parts,
            reason=score.reason,
            experts=experts,
            prompt_experts=prompt_experts,
        )

    async def _complete(
        self, prompt: TokenizedPrompt, sampling: Sampling, episode_id: str, partial: Trajectory | None
    ) -> Completion:
        """Return the response, the partial rollout first."""
        begun = partial_rollout.begin_from(partial, sampling.max_tokens, self._engine.serving.number)
        num_begun = len(begun.token_ids)
        prompt_ids = [*prompt.token_ids.tolist(), *begun.token_ids.tolist()]
        rest = partial_rollout.continue_sampling(sampling, num_begun)
        try:
            completion = partial_rollout.join(
                begun, await self._engine.generate(prompt_ids, rest, episode_id)
            )
        except Interrupted as error:
            raise Unfinished(
                error.message, completion=partial_rollout.join(begun, error.completion)
            ) from error
        return partial_rollout.cut_at_stop(completion, num_begun, sampling.stop, self._decode)

    def _answer(self, prompt: TokenizedPrompt, completion: Completion) -> Answer:
        response = self._decode(completion.token_ids.tolist())
        return Answer(prompt.prompt, response, completion.finish_reason, len(completion.token_ids))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
