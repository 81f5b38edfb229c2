"""Checks of what a run reads besides its models: prompts, and the lengths of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.core.config.tree import Config
from asyncrl.planner.plan.prepare import is_builtin
from asyncrl.planner.plan.sources import check_sources


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
    """Say which prompts are not there, cannot be read, or do not fit."""
    has_environment = config.rollout.environment is not None
    yield from check_sources(config.data, Path(config.model.path), is_builtin, has_environment)
