"""Checks of what a run reads besides its models: prompts, environment, reward, and the lengths of rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.tree import Config
from asyncrl.control.prepare import is_builtin
from asyncrl.control.sources import check_sources, missing_function, names_of


def check_lengths(config: Config) -> Iterator[str]:
    """A row is trained whole, on all the ranks of its copy together: cp does not make it shorter."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    if longest > config.learner.max_tokens_per_microbatch:
        yield (
            f"learner.max_tokens_per_microbatch: {config.learner.max_tokens_per_microbatch} is less than a "
            f"row may have: data.max_prompt_tokens + rollout.max_tokens = {longest}; raise it to that, and "
            "learner.cp if memory does not suffice"
        )


def check_data(config: Config) -> Iterator[str]:
    """Say which prompts, or which environment, are not there or cannot be read."""
    yield from check_sources(config.data, is_builtin)
    environment = config.rollout.environment
    if environment is not None and (problem := missing_function(environment.name)):
        yield f"rollout.environment: {problem}"


def check_reward(config: Config) -> Iterator[str]:
    """Say which reward of a file is not there."""
    for part in config.reward.fn:
        yield from _check_reward_part(part.fn)


def _check_reward_part(fn: str) -> Iterator[str]:
    file, separator, function = fn.rpartition(":")
    if not separator or "://" in fn:
        return
    if not Path(file).is_file():
        yield f"reward.fn: there is no file '{file}'"
        return
    try:
        # Parsed and not run: what it imports may need packages that only the service's process loads.
        module = ast.parse(Path(file).read_bytes(), filename=file)
    except (SyntaxError, ValueError) as error:
        yield f"reward.fn: '{file}' is no Python file: {error}"
        return
    if function not in set(names_of(module)):
        yield f"reward.fn: '{file}' defines no function '{function}'"
