"""Parts that a replica and a standalone evaluation share: a configuration's data and its evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from rollout_service.data.prompts import PromptSet, TokenizedPrompt
from rollout_service.data.sources import load_sources
from rollout_service.engine.protocol import Engine
from rollout_service.environments.conversation import ChatTemplate
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import build_runner
from rollout_service.evaluation.answers import make_stater
from rollout_service.evaluation.evaluator import EvaluationSettings, Evaluator
from rollout_service.rewards.total import TotalReward
from rollout_service.sampling.episode import EpisodeRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_data(
    config: Config, episodes: Episodes | None
) -> tuple[PreTrainedTokenizerBase, PromptSet, PromptSet | None]:
    """Return the tokenizer, the training data and the held-out data of a run.

    Raises:
        ConfigError, DataError: See `load_sources`.
    """
    tokenizer = load_tokenizer(config.model.path)
    data, limit = config.data, config.data.max_prompt_tokens
    prompts = load_sources(data.train, tokenizer, limit, data.curriculum, _tools(episodes))
    return tokenizer, open_chats(prompts, tokenizer, episodes), load_held_out(config, tokenizer, episodes)


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a model's folder.

    Raises:
        ConfigError: There is none, or it cannot be read. Without its files transformers makes an empty one
            for some models, of which every prompt is empty.
    """
    from transformers import AutoTokenizer

    hint = "Put the tokenizer.json and tokenizer_config.json of the model there"
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        what = f"model.path: the tokenizer in {folder} cannot be loaded: {error}"
        raise ConfigError(what, hint=hint) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(f"model.path: {folder} holds no tokenizer (tokenizer.json)", hint=hint)
    return tokenizer


def load_held_out(
    config: Config, tokenizer: PreTrainedTokenizerBase, episodes: Episodes | None
) -> PromptSet | None:
    """Return the held-out data of a run, if it has any. Raises as `load_data`."""
    data = config.data
    if not data.eval:
        return None
    prompts = load_sources(data.eval, tokenizer, data.max_prompt_tokens, tools=_tools(episodes))
    return open_chats(prompts, tokenizer, episodes)


def open_chats(
    prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, episodes: Episodes | None
) -> PromptSet:
    """Return the prompts as their environment needs them: chats that it opens do not begin an answer.

    Raises:
        ConfigError: The chat template does not allow it.
    """
    has_chats = any(not isinstance(one.prompt.content, str) for one in prompts.prompts)
    if episodes is None or not episodes.opens or not has_chats:
        return prompts
    voice = ChatTemplate(tokenizer, episodes.roles, episodes.tools)

    def opened(one: TokenizedPrompt) -> TokenizedPrompt:
        if isinstance(one.prompt.content, str):
            return one
        return replace(one, token_ids=np.asarray(voice.without_answer(one.token_ids.tolist()), np.int32))

    return replace(prompts, prompts=tuple(opened(one) for one in prompts.prompts))


def _tools(episodes: Episodes | None) -> Sequence[Mapping[str, object]]:
    return episodes.tools if episodes else ()


def build_evaluator(
    config: Config,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    held_out: PromptSet | None,
    reward: TotalReward,
    episodes: Episodes | None,
) -> Evaluator | None:
    """Return the evaluator of a run, None if there are no held-out prompts."""
    if held_out is None:
        return None
    runner = build_runner(engine, tokenizer, episodes, reward.for_evaluation(), held_out.prompts)
    return make_evaluator(config, runner, tokenizer, held_out)


def make_evaluator(
    config: Config, runner: EpisodeRunner, tokenizer: PreTrainedTokenizerBase, held_out: PromptSet
) -> Evaluator:
    """Return the evaluator of a run, on the first prompts of each source."""
    section, rollout = config.eval, config.rollout
    settings = EvaluationSettings(
        section.temperature,
        rollout.max_tokens,
        config.run.seed,
        section.samples,
        rollout.stop,
        max_at_once=rollout.max_sequences,
    )
    stater = make_stater(tokenizer, [part.fn for part in config.reward.fn])
    return Evaluator(runner, held_out.first_of_each(section.prompts), settings, stater)
