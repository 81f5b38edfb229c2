"""Rewards: which are summed, and what length does to them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field

from asyncrl.core.config.reading.coercion import as_rewards
from asyncrl.core.config.sections.section import NAME_PATTERN, Count, Section, Share, Text


class RewardPart(Section):
    """One of the rewards that are summed: which, its weight, and the arguments that it takes.

    `name` is what its metrics are called; without it, the last word of `fn`. docs/rewards.md lists the
    arguments; a function of a file gets them by name.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=False, allow_inf_nan=False)

    fn: Text
    """Registered name, `file.py:function`, or URL of a server. For example: gsm8k"""
    weight: float = 1.0
    """[1] Factor of its score in the sum."""
    name: Annotated[str | None, Field(pattern=NAME_PATTERN)] = None
    """Name of its metrics; null takes the last word of `fn`. For example: accuracy"""

    @property
    def arguments(self) -> dict[str, object]:
        """Keys beyond the declared fields."""
        return dict(self.model_extra or {})


class OverlongSection(Section):
    """An answer that reaches into the last `buffer_tokens` before `rollout.max_tokens` loses up to `penalty`,
    in proportion (DAPO, arXiv 2503.14476).
    """

    buffer_tokens: Count
    """[tokens] Length before the limit over which the penalty grows from 0. For example: 128"""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """[reward] Penalty of an answer at the limit."""


class RewardSection(Section):
    """`fn` is a registered name, `file.py:function`, the URL of a server, or a list of rewards
    `{fn, weight, ...arguments}` that are summed.

    A run ends if more than `max_error_rate` of the last answers could not be scored: a function raised, took
    too long, or returned something other than a finite number. `overlong` reduces the reward of long answers.
    """

    fn: Annotated[
        tuple[RewardPart, ...],
        BeforeValidator(as_rewards, json_schema_input_type=RewardPart | Text | tuple[RewardPart | Text, ...]),
        Field(min_length=1),
    ]
    """The functions that score an answer. For example: gsm8k, [math, {fn: format, weight: 0.1}]"""
    max_error_rate: Share = 0.2
    """[share] Largest share of the last answers that may fail to be scored; above it the run ends."""
    overlong: OverlongSection | None = None
    """Length penalty near `rollout.max_tokens`; null for none. For example: {buffer_tokens: 128}"""
