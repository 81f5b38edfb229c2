"""Finds a reward function by name or by `file.py:function`, and calls it safely.

Two forms are called: `score(response, ground_truth, **extra)` and verl's
`compute_score(data_source, solution_str, ground_truth, extra_info)`, told apart by parameter names.
Invariant: what comes out is a finite number or a RewardError; nothing else reaches a trajectory.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import AsyncrlError, ConfigError
from rollout_service.prompts import Prompt
from rollout_service.rewards.competition_math import score_math
from rollout_service.rewards.dapo_math import score_math_dapo
from rollout_service.rewards.gsm8k import score_flexible, score_strict
from rollout_service.rewards.matching import score_digit_sort, score_exact_match

Score = Callable[..., Any]

BUILT_IN: Mapping[str, Score] = {
    "gsm8k": score_strict,
    "gsm8k_flexible": score_flexible,
    "math": score_math,
    "math_dapo": score_math_dapo,
    "exact_match": score_exact_match,
    "digit_sort": score_digit_sort,
}
DEADLINE_S = 30.0


class RewardError(AsyncrlError, ValueError):
    """A reward function raised, took too long, or returned something that is no finite number."""


@dataclass(frozen=True)
class Answer:
    """What a reward function judges."""

    prompt: Prompt
    response: str
    finish_reason: str
    num_tokens: int


class Reward:
    """A reward function, ready to be called.

    Args:
        name: For messages.
        score: The function.
        runs_in_thread: Whether it may be slow, and must not hold up the event loop.
    """

    def __init__(self, name: str, score: Score, runs_in_thread: bool) -> None:
        self.name = name
        self._score = score
        self._runs_in_thread = runs_in_thread
        self._is_verl_form, self._accepted = _inspect(score)

    async def score(self, answer: Answer) -> float:
        """Return the reward. Raises RewardError."""
        if not self._runs_in_thread:
            return self.score_now(answer)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.to_thread(self.score_now, answer)
        except TimeoutError:
            raise RewardError(f"the reward '{self.name}' took longer than {DEADLINE_S:g} s") from None

    def score_now(self, answer: Answer) -> float:
        """As `score`, in this thread."""
        try:
            value = self._call(answer)
        except Exception as error:  # a user's function may raise anything; its group fails with this reason
            message = f"the reward '{self.name}' raised {type(error).__name__}: {error}"
            raise RewardError(f"{message} (row {answer.prompt.row})") from error
        return self._checked(value)

    def _call(self, answer: Answer) -> Any:
        prompt = answer.prompt
        if self._is_verl_form:
            return self._score(
                data_source=prompt.data_source,
                solution_str=answer.response,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
            )
        extra = {
            "data_source": prompt.data_source,
            "extra_info": prompt.extra_info,
            "finish_reason": answer.finish_reason,
            "num_tokens": answer.num_tokens,
        }
        accepted = (
            extra if self._accepted is None else {k: v for k, v in extra.items() if k in self._accepted}
        )
        return self._score(answer.response, prompt.ground_truth, **accepted)

    def _checked(self, value: Any) -> float:
        if isinstance(value, Mapping):  # verl's functions may return {"score": ..., "acc": ...}
            value = value.get("score")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(f"the reward '{self.name}' returned {value!r}, which is no finite number")
        return float(value)


def load_reward(name: str, folder: Path = Path()) -> Reward:
    """Return the reward registered as `name`, or the function in `file.py:function` (relative to `folder`).

    Raises:
        ConfigError: There is no such name, file or function.
    """
    if name in BUILT_IN:
        return Reward(name, BUILT_IN[name], runs_in_thread=False)
    file, separator, function = name.rpartition(":")
    if not separator or not file.endswith(".py"):
        raise ConfigError(
            f"there is no reward '{name}'", hint=f"Use one of {sorted(BUILT_IN)} or file.py:function"
        )
    score = getattr(_import_file(folder / file), function, None)
    if not callable(score):
        raise ConfigError(f"{folder / file} has no function '{function}'")
    return Reward(name, score, runs_in_thread=True)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"the reward file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"asyncrl_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may raise anything when it is imported
        raise ConfigError(
            f"the reward file {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


def _inspect(score: Score) -> tuple[bool, frozenset[str] | None]:
    """Return whether `score` has verl's form, and the names it accepts (None if any)."""
    try:
        parameters = inspect.signature(score).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return False, frozenset()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "solution_str" in parameters, None if takes_any else frozenset(parameters)
