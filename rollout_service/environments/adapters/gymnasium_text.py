"""Gymnasium's text environments: observations and actions are strings.

The tests use a class of the same interface; the library is no dependency. Tried by hand with 1.4.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, SupportsFloat, SupportsInt

from asyncrl.core.errors import ConfigError
from rollout_service.environments.protocol import Environment, EnvironmentFailed, Observation, Step

if TYPE_CHECKING:
    from rollout_service.data.prompts import Prompt


class TextGame(Protocol):
    """Used part of a `gymnasium.Env`."""

    def reset(self, *, seed: int) -> tuple[object, object]:
        """Return the first observation, and information."""

    def step(self, action: str, /) -> tuple[object, SupportsFloat, bool, bool, object]:
        """Return observation, reward, whether it is terminated, whether truncated, and information."""

    def close(self) -> None:
        """Let go of what was opened."""


class GymnasiumText:
    """Makes episodes of the environment `id`.

    Every sample of a group starts from the same state: `reset` gets the seed in the prompt's
    `extra_info.seed`, or its row's number. The episode's reward is the sum of all steps' rewards.

    Args:
        id: The name that it is registered under.
        arguments: For `gymnasium.make`.
        make: Makes an environment, in place of `gymnasium.make`.

    Raises:
        ConfigError: The library is not installed, or cannot make this environment.
    """

    def __init__(
        self,
        id: str,
        arguments: Mapping[str, object] | None = None,
        make: Callable[..., TextGame] | None = None,
    ) -> None:
        self._id = id
        self._arguments = dict(arguments or {})
        self._make = make or _import_make()
        try:
            self._make(id, **self._arguments).close()  # once, so that nothing starts if it cannot be made
        except Exception as error:  # an environment's constructor may raise anything
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the Gymnasium environment '{id}' cannot be made: {problem}") from error

    def __call__(self, prompt: Prompt, seed: int) -> Environment:
        """Return the environment of one episode."""
        seed_of_row = prompt.extra_info.get("seed", prompt.row)
        if not isinstance(seed_of_row, str | SupportsInt):
            raise EnvironmentFailed(f"row {prompt.row}: 'seed' is a {type(seed_of_row).__name__}")
        return GymnasiumEpisode(lambda: self._make(self._id, **self._arguments), int(seed_of_row))


class GymnasiumEpisode(Environment):
    """One episode of an environment with `reset`, `step` and `close`; each call runs in a thread."""

    def __init__(self, make: Callable[[], TextGame], start_seed: int) -> None:
        self._make = make
        self._start_seed = start_seed
        self._env: TextGame | None = None
        self._reward = 0.0

    async def start(self) -> Observation:
        self._env = env = await asyncio.to_thread(self._make)
        observation, _ = await asyncio.to_thread(env.reset, seed=self._start_seed)
        return _as_text(observation)

    async def step(self, answer: str) -> Step:
        assert self._env is not None, "start was called"
        found = await asyncio.to_thread(self._env.step, answer)
        observation, reward, is_terminated, is_truncated, _ = found
        self._reward += float(reward)
        return Step(_as_text(observation), is_done=bool(is_terminated or is_truncated))

    async def score(self) -> float:
        return self._reward

    async def close(self) -> None:
        if self._env is not None:
            await asyncio.to_thread(self._env.close)


def _import_make() -> Callable[..., TextGame]:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            "rollout.environment: gymnasium is not installed", hint="pip install gymnasium"
        ) from error
    make: Callable[..., TextGame] = gymnasium.make
    return make


def _as_text(observation: object) -> str:
    if not isinstance(observation, str):
        raise EnvironmentFailed(
            f"the Gymnasium environment observes a {type(observation).__name__}, not text",
            hint="Wrap it so that observations and actions are strings",
        )
    return observation
