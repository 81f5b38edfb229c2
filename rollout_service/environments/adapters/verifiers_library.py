"""Environments of the `verifiers` library: a `MultiTurnEnv` and its rubric, without its own sampling.

Written to the interface of `verifiers` 0.1 (`init_state`, `setup_state`, `env_response`, `is_completed`, and
a rubric's `score_rollout`), with the signatures used before 0.1.8 and since. The tests use classes of that
interface; the library is no dependency. Tried by hand with 0.1.9; later interfaces are refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol, SupportsFloat, TypedDict, TypeVar

from asyncrl.core.errors import ConfigError
from rollout_service.environments.protocol import Environment, EnvironmentFailed, Step
from rollout_service.rewards.score import Score, blame

if TYPE_CHECKING:
    from rollout_service.data.prompts import Prompt


NEEDED = ("env_response", "is_completed", "rubric")
PARTS = ("prompt", "completion", "answer", "task", "info", "example_id")


class Model(Protocol):
    """A message of the library's later releases."""

    def model_dump(self) -> Mapping[str, object]:
        """Return it as a mapping."""


class RolloutScore(Protocol):
    """Score that a rubric returned before 0.1.8."""

    reward: SupportsFloat
    metrics: Mapping[str, object]


class Row(TypedDict, total=False):
    """A row of a data set as the library knows it."""

    prompt: list[dict[str, str]]
    answer: object
    info: dict[str, object]
    task: str
    example_id: int


class State(Row, total=False):
    """Used fields of the library's state of an episode."""

    completion: list[dict[str, str]]
    responses: list[object]
    trajectory: list[object]
    turn: int
    timing: dict[str, object]
    final_env_response: object
    reward: SupportsFloat
    metrics: Mapping[str, object] | None
    error: BaseException | None


class Rubric(Protocol):
    """Scores an episode: a state, which it adds to, or its parts by name, whose score it returns."""

    @property
    def score_rollout(self) -> Callable[..., Awaitable[RolloutScore] | RolloutScore]: ...


class LibraryEnvironment(Protocol):
    """Used part of a `MultiTurnEnv`; its methods are called as their signatures say."""

    @property
    def rubric(self) -> Rubric: ...

    @property
    def env_response(self) -> Callable[..., Awaitable[Response] | Response]: ...

    @property
    def is_completed(self) -> Callable[..., Awaitable[bool] | bool]: ...


LibraryMessage = Mapping[str, object] | Model
Response = list[LibraryMessage] | tuple[list[LibraryMessage], State]
"""Messages; releases before 0.1.8 give the state back too."""
T = TypeVar("T")


class VerifiersLibrary:
    """Makes episodes of the environment `id`, for prompts that are chats.

    A row's `extra_info` is the `info` of the library, its ground truth the `answer`, its `extra_info.task`
    the `task`. Tool calls of the library's own tool environments are not parsed.

    Args:
        id: Name passed to `verifiers.load_environment`.
        arguments: Keyword arguments passed to it.
        load: Loads an environment, in place of `verifiers.load_environment`.

    Raises:
        ConfigError: The library is not installed, or the environment lacks one of `NEEDED`.
    """

    def __init__(
        self,
        id: str,
        arguments: Mapping[str, object] | None = None,
        load: Callable[..., LibraryEnvironment] | None = None,
    ) -> None:
        self._env = (load or _import_load())(id, **dict(arguments or {}))
        missing = [name for name in NEEDED if not hasattr(self._env, name)]
        if missing:
            raise ConfigError(f"the verifiers environment '{id}' has no {', '.join(missing)}")
        _watch(self._env.rubric)

    def __call__(self, prompt: Prompt, seed: int) -> Environment:
        """Return the environment of one episode."""
        return VerifiersEpisode(self._env, prompt)


class VerifiersEpisode(Environment):
    """One episode: the library's state, updated with each answer of the model."""

    def __init__(self, env: LibraryEnvironment, prompt: Prompt) -> None:
        if isinstance(prompt.content, str):
            raise EnvironmentFailed(f"row {prompt.row} is not a chat", hint="verifiers wants chat messages")
        self._env = env
        self._prompt = [dict(message) for message in prompt.content]
        self._row: Row = {
            "prompt": self._prompt,
            "answer": prompt.ground_truth,
            "info": dict(prompt.extra_info),
            "task": str(prompt.extra_info.get("task", "default")),
            "example_id": prompt.row,
        }
        self._state: State = {}

    async def start(self) -> str:
        self._state = await self._first_state()
        if hasattr(self._env, "setup_state"):
            self._state = await _awaited(self._env.setup_state(self._state)) or self._state
        return ""

    async def _first_state(self) -> State:
        """Return the state of `init_state` if that takes a row (from 0.1.8 on), else the earlier form."""
        init_state = getattr(self._env, "init_state", None)
        if init_state is None or "input" not in inspect.signature(init_state).parameters:
            row = self._row
            return {
                "prompt": row["prompt"],
                "answer": row["answer"],
                "info": row["info"],
                "task": row["task"],
                "example_id": row["example_id"],
                "completion": [],
                "responses": [],
                "trajectory": [],
                "turn": 0,
                "timing": {},
            }
        state: State = await _awaited(init_state(self._row, client=None, model="", sampling_args=None))
        state["completion"], state["turn"] = [], 0
        return state

    async def step(self, answer: str) -> Step:
        state = self._state
        said = {"role": "assistant", "content": answer}
        state["trajectory"].append({"prompt": self._messages(), "completion": [said]})
        state["completion"].append(said)
        state["turn"] += 1
        if await self._is_completed():
            return Step(is_done=True)
        response = await _awaited(self._env.env_response(self._messages(), state))
        told, self._state = response if isinstance(response, tuple) else (response, state)
        messages = [_as_message(message) for message in told]
        self._state["completion"] += messages
        is_final = self._state.get("final_env_response") is not None
        return Step(messages, is_done=is_final or not messages)

    async def score(self) -> Score:
        error, reason = self._state.get("error"), None
        if error is not None and (reason := blame(error)) is not None:
            raise EnvironmentFailed(f"the verifiers environment failed: {error!r}", reason=reason)
        raised: list[Exception] = []
        _RAISED.set(raised)
        score = await self._score()
        if raised:
            what = f"a reward function of verifiers raised {type(raised[0]).__name__}: {raised[0]}"
            raise EnvironmentFailed(what, reason=blame(raised[0])) from raised[0]
        return score

    async def _score(self) -> Score:
        rubric, state = self._env.rubric, self._state
        known = inspect.signature(rubric.score_rollout).parameters
        if "completion" not in known:
            others = {"score_sem": contextlib.nullcontext()} if "score_sem" in known else {}
            await _awaited(rubric.score_rollout(state, **others))
            return _score(state["reward"], state.get("metrics") or {})
        values: Mapping[str, object] = state
        parts = {name: values[name] for name in PARTS}
        found = await _awaited(rubric.score_rollout(**parts, state=state))
        return _score(found.reward, found.metrics)

    def _messages(self) -> list[dict[str, str]]:
        return [*self._prompt, *self._state["completion"]]

    async def _is_completed(self) -> bool:
        is_completed = self._env.is_completed
        takes_messages = "messages" in inspect.signature(is_completed).parameters
        arguments = (self._messages(), self._state) if takes_messages else (self._state,)
        return bool(await _awaited(is_completed(*arguments)))


_RAISED: ContextVar[list[Exception]] = ContextVar("raised")
"""Errors of the reward functions of the episode that is being scored."""


def _watch(rubric: object) -> None:
    """Note what a rubric's functions raise: the library logs it and goes on with a reward of 0."""
    for inner in getattr(rubric, "rubrics", ()):
        _watch(inner)
    for name in ("funcs", "reward_funcs"):
        if isinstance(functions := getattr(rubric, name, None), list):
            functions[:] = map(_watched, functions)


def _watched(function: Callable[..., Awaitable[object] | object]) -> Callable[..., Awaitable[object]]:
    @functools.wraps(function)
    async def call(*arguments: object, **named: object) -> object:
        try:
            return await _awaited(function(*arguments, **named))
        except Exception as error:  # a user's function may raise anything; `score` fails with it
            _RAISED.get().append(error)
            raise

    return call


async def _awaited(value: Awaitable[T] | T) -> T:
    return await value if isinstance(value, Awaitable) else value


def _as_message(message: LibraryMessage) -> dict[str, str]:
    found = message if isinstance(message, Mapping) else message.model_dump()
    return {"role": str(found["role"]), "content": str(found.get("content") or "")}


def _score(reward: SupportsFloat, metrics: Mapping[str, object]) -> Score:
    parts = {str(name): float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return Score(float(reward), parts)


def _import_load() -> Callable[..., LibraryEnvironment]:
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(
            "rollout.environment: verifiers is not installed", hint="pip install verifiers==0.1.9"
        ) from error
    load: Callable[..., LibraryEnvironment] | None = getattr(verifiers, "load_environment", None)
    if load is None:
        raise ConfigError(
            "rollout.environment: this verifiers has no load_environment", hint="pip install verifiers==0.1.9"
        )
    return load
