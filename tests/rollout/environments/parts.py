"""Parts of the tests of environments: prompts, a scripted engine that speaks given texts, episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.core.config.tree import EnvironmentSection, as_environment
from asyncrl.core.experience import Trajectory
from asyncrl.core.staleness import Span
from rollout_service.data.prompts import Prompt, TokenizedPrompt, tokenize
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.environments.registry import Episodes, load_environment
from rollout_service.environments.runner import MultiTurn
from rollout_service.rewards.score import Answer, RewardError, Score
from rollout_service.tasks.tool_product.vocabulary import build_tokenizer

CALCULATOR = {"name": "tools", "tools": ["calculator"], "call": r"\?(.+)", "reply": "!{result}="}
TOKENIZER = build_tokenizer()


class ScriptedPhrases:
    """A scripted engine: each request is answered with the next of the given texts.

    Args:
        phrases: (text, versions): token i is sampled by `versions[i]`, those beyond by the last one. A text
            that ends in `...` is cut at the token limit, all others end with the end of sequence.
    """

    def __init__(self, tokenizer: Any, phrases: Sequence[tuple[str, Sequence[int]]]) -> None:
        self._tokenizer = tokenizer
        self._phrases = list(phrases)
        self.requests: list[tuple[list[int], Sampling, str]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        self.requests.append((list(prompt_ids), sampling, request_id))
        text, versions = self._phrases.pop(0)
        is_cut = text.endswith("...")
        ids = self._tokenizer(text.removesuffix("..."), add_special_tokens=False)["input_ids"]
        ids = [*ids, *([] if is_cut else [self._tokenizer.eos_token_id])][: sampling.max_tokens]
        of_tokens = [versions[min(place, len(versions) - 1)] for place in range(len(ids))]
        changes = [i for i, version in enumerate(of_tokens) if i == 0 or version != of_tokens[i - 1]]
        ends = [*changes[1:], len(ids)]
        spans = tuple(Span(of_tokens[start], start, end) for start, end in zip(changes, ends, strict=True))
        is_whole = ids[-1] == self._tokenizer.eos_token_id
        return Completion(
            token_ids=np.asarray(ids, np.int32),
            logprobs=-1.0 - np.arange(len(ids), dtype=np.float32) - 100.0 * len(self.requests),
            spans=spans,
            finish_reason="stop" if is_whole else "length",
        )


class ExactMatch:
    """A reward: 1 for the ground truth, and all answers that it was asked about."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.failures: list[RewardError] = []
        self.scores: list[Score] = []

    async def score(self, answer: Answer) -> Score:
        self.answers.append(answer)
        value = float(answer.response == str(answer.prompt.ground_truth))
        return Score(value, {"exact_match": value})

    def note_scored(self, score: Score, source: str) -> None:
        self.scores.append(score)

    def note_failed(self, error: RewardError, source: str) -> None:
        self.failures.append(error)


def load(spec: Any, folder: Path = Path()) -> Episodes:
    """Return the episodes that `rollout.environment: <spec>` means."""
    return load_environment(EnvironmentSection.model_validate(as_environment(spec)), folder)


def make_prompt(
    content: Any = "47*83=", ground_truth: Any = "3901", tokenizer: Any = TOKENIZER, **extra_info: Any
) -> TokenizedPrompt:
    prompt = Prompt(7, content, ground_truth, "test", extra_info)
    return TokenizedPrompt(0, prompt, np.asarray(tokenize([prompt], tokenizer)[0], np.int32))


def run_episode(
    episodes: Episodes,
    phrases: Sequence[tuple[str, Sequence[int]]],
    prompt: TokenizedPrompt | None = None,
    max_tokens: int = 64,
    tokenizer: Any = TOKENIZER,
) -> tuple[Trajectory, ScriptedPhrases, ExactMatch]:
    """Run one episode; return its trajectory, the engine that spoke, and the reward that judged."""
    prompt = prompt or make_prompt(tokenizer=tokenizer)
    engine, reward = ScriptedPhrases(tokenizer, phrases), ExactMatch()
    has_chats = not isinstance(prompt.prompt.content, str)

    async def run() -> Trajectory:
        runner = MultiTurn(engine, tokenizer, episodes, reward, has_chats)  # type: ignore[arg-type]
        return await runner.run(prompt, Sampling(1.0, max_tokens, 11), "5.1.0")

    return asyncio.run(run()), engine, reward
