"""Call of a reward function: passes the arguments that it declares, and accepts only finite numbers.

Two forms are called: `score(response, ground_truth, **extra)` and verl's
`compute_score(data_source, solution_str, ground_truth, extra_info)`, told apart by parameter names. Of
verl's four, a function gets those that it takes: its functions of one data set leave out some.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from asyncrl.core.errors import ConfigError
from rollout_service.rewards.score import Answer, RewardError, Score, blame, checked_score

ScoreFunction = Callable[..., object]
EXTRA = ("data_source", "extra_info", "finish_reason", "num_tokens", "prompt")
VERL_FORM = ("data_source", "solution_str", "ground_truth", "extra_info")


class BoundFunction:
    """A reward function with the arguments that the configuration gives it.

    Args:
        name: For messages.
        arguments: Passed by name, besides what every call brings.
        is_closed: Whether a `**extra` of the function takes no arguments.

    Raises:
        ConfigError: The function does not take one of the arguments, or wants others than every call brings.
    """

    def __init__(
        self,
        name: str,
        function: ScoreFunction,
        arguments: Mapping[str, object] | None = None,
        is_closed: bool = False,
    ) -> None:
        self.name = name
        self._function = function
        self._arguments = dict(arguments or {})
        accepted, takes_any = _inspect(function)
        self._is_verl_form = "solution_str" in accepted
        words = VERL_FORM if self._is_verl_form else EXTRA
        self._extra = tuple(word for word in words if takes_any or word in accepted)
        known = accepted - {*VERL_FORM, *EXTRA, "response"}
        unknown = [argument for argument in self._arguments if argument not in known]
        if unknown and (is_closed or not takes_any or set(unknown) & {*VERL_FORM, *EXTRA, "response"}):
            hint = f"It takes {', '.join(sorted(known))}" if known else "It takes none"
            raise ConfigError(f"the reward '{name}' takes no argument '{unknown[0]}'", hint=hint)
        self._check_call()

    def __call__(self, answer: Answer) -> Score:
        """Return the function's number, and the reason that it gives. Raises RewardError."""
        try:
            value = self._call(answer)
        except Exception as error:  # a user's function may raise anything; its group fails with this reason
            message = f"the reward '{self.name}' raised {type(error).__name__}: {error}"
            raise RewardError(f"{message} (row {answer.prompt.row})", reason=blame(error)) from error
        return checked_score(self.name, value)

    def _call(self, answer: Answer) -> object:
        prompt = answer.prompt
        known = {
            "solution_str": answer.response,
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
            "extra_info": prompt.extra_info,
            "finish_reason": answer.finish_reason,
            "num_tokens": answer.num_tokens,
            "prompt": prompt.content,
        }
        extra = {word: known[word] for word in self._extra}
        first = () if self._is_verl_form else (answer.response, prompt.ground_truth)
        return self._function(*first, **extra, **self._arguments)

    def _check_call(self) -> None:
        try:
            signature = inspect.signature(self._function)
        except (TypeError, ValueError):  # a built-in without a signature
            return
        first = () if self._is_verl_form else (None, None)
        try:
            signature.bind(*first, **dict.fromkeys(self._extra), **self._arguments)
        except TypeError as error:
            brought = self._extra if self._is_verl_form else ("response", "ground_truth", *self._extra)
            hint = f"A call brings {', '.join([*brought, *self._arguments])}"
            raise ConfigError(f"the reward '{self.name}' cannot be called: {error}", hint=hint) from error


class FunctionReward:
    """A fast function, called in the event loop; a reward by itself, and a part of others."""

    def __init__(
        self,
        name: str,
        function: ScoreFunction,
        arguments: Mapping[str, object] | None = None,
        is_closed: bool = False,
    ) -> None:
        self.name = name
        self._bound = BoundFunction(name, function, arguments, is_closed)

    async def score(self, answer: Answer) -> Score:
        """Return the function's number as the whole reward. Raises RewardError."""
        found = self._bound(answer)
        return Score(found.value, {self.name: found.value}, found.reason)

    async def start(self) -> None:
        """Nothing is needed."""

    async def value(self, answer: Answer) -> Score:
        """Return the function's number. Raises RewardError."""
        return self._bound(answer)

    async def close(self) -> None:
        """Nothing was started."""

    def child_pids(self) -> list[int]:
        """Return none."""
        return []


def _inspect(function: ScoreFunction) -> tuple[frozenset[str], bool]:
    """Return the names that `function` accepts, and whether it takes any other too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return frozenset(), False
    named = (one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    return frozenset(named), any(one.kind is one.VAR_KEYWORD for one in parameters)
