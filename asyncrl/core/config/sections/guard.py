"""The stability guard: which metrics it watches, their limits, and what it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from asyncrl.core.config.plain import JsonValue
from asyncrl.core.config.sections.section import Count, NonNegativeNumber, Section, refuse
from asyncrl.core.metrics import find, unknown_names

WATCHED_SOURCES = ("step", "leader")
"""Sources of the metrics that the guard sees: the learner, once per step."""

WAYS = ("max", "min", "min_share", "max_times")


def _is_number(way: str) -> dict[str, JsonValue]:
    return {"required": [way], "properties": {way: {"type": "number"}}}


class LimitSection(Section):
    """The limit of one metric: one of `max`, `min`, `min_share` and `max_times`, and over how many steps.

    What is compared is the median of the last `over_steps` values: with 1 a single value is a finding.
    """

    model_config = ConfigDict(json_schema_extra={"oneOf": [_is_number(way) for way in WAYS]})

    max: float | None = None
    """The highest value, in the metric's unit. For example: 2.0"""
    min: float | None = None
    """The lowest value, in the metric's unit. For example: 0.3"""
    min_share: NonNegativeNumber | None = None
    """[share] The lowest value, of the median of the run's first ones. For example: 0.05"""
    max_times: NonNegativeNumber | None = None
    """[1] The highest value, in multiples of the median of the run's last ones. For example: 20"""
    over_steps: Count = 1
    """[steps] Whose median is compared. For example: 5"""

    @model_validator(mode="after")
    def check_one_is_set(self) -> Self:
        """Check that there is one limit: a metric with two would need two pasts."""
        if sum(getattr(self, way) is not None for way in WAYS) != 1:
            ways = "one of {max: x}, {min: x}, {min_share: x} and {max_times: x}"
            raise refuse(ways, "null takes the limit away")
        return self

    @model_serializer
    def as_written(self) -> dict[str, int | float]:
        """Return what is set."""
        found = {way: getattr(self, way) for way in WAYS}
        over = {"over_steps": self.over_steps} if self.over_steps > 1 else {}
        return {way: value for way, value in found.items() if value is not None} | over


DEFAULT_LIMITS: Mapping[str, LimitSection | None] = {
    "actor/step_kl": LimitSection(max=0.25, over_steps=9),
    "actor/step_gain": LimitSection(min=-0.2, over_steps=9),
    "actor/unsampled_share": LimitSection(max=0.0),
    "actor/ppo_kl": LimitSection(max=0.3),
    "actor/grad_norm": LimitSection(max_times=20.0, over_steps=5),
    "critic/grad_norm": LimitSection(max_times=20.0, over_steps=5),
    "actor/pg_clipfrac": LimitSection(max=0.3),
    "critic/vf_clipfrac": LimitSection(max=0.3),
    "actor/entropy": LimitSection(min_share=0.05, over_steps=5),
    "rollout_corr/rollout_is_eff_sample_size": LimitSection(min=0.3),
    "perf/throughput": LimitSection(min_share=0.3, over_steps=20),
}
"""Watched metrics and limits by default; `weights/engine_gap_mean` has a limit by dtype."""


def with_default_limits(value: object) -> object:
    """Return the limits that are given, and the usual ones of all other metrics."""
    return {**DEFAULT_LIMITS, **value} if isinstance(value, Mapping) else value


def check_names(limits: Mapping[str, LimitSection | None]) -> Mapping[str, LimitSection | None]:
    """Raise ValueError for a name that no row of the learner has: its limit would never be looked at."""
    for name in limits:
        metric = find(name)
        if metric is None:
            similar = unknown_names([name]).get(name)
            raise refuse(
                f"a map of names in docs/metrics.md; there is no '{name}'",
                f"Did you mean '{similar}'?" if similar else "",
            )
        if metric.source not in WATCHED_SOURCES:
            raise refuse(
                f"a map of the learner's metrics; '{name}' is made elsewhere",
                "The guard judges each learner step, before the other metrics of its row are known",
            )
    return limits


class GuardSection(Section):
    """Watches the metrics of every step; `action` answers a severe finding, every finding is explained.

    A value beyond its limit is a finding: docs/guard.md says where each limit comes from. A limit is
    `{max: x}`, `{min: x}`, `{min_share: x}` of the run's first values or `{max_times: x}` of its last ones;
    null takes a metric's usual limit away, and a metric that is not named keeps its own. A finding is severe
    if the value is also far from the run's usual ones (`z_score` robust deviations, after `warmup_steps`), or
    ten times beyond (a limit of 0 has no such value), or if it can only be a fault: weights that differ,
    tokens that no version sampled, updates that are far too large or against the advantages.
    """

    action: Literal["warn", "skip_update", "reduce_lr", "kl_fallback", "rollback", "stop"] = "warn"
    """Action on a severe finding."""
    warmup_steps: Annotated[int, Field(ge=3)] = 10
    """[steps] Steps whose values define what is usual."""
    z_score: Annotated[float, Field(gt=0)] = 8.0
    """[1] Robust deviations from the usual at which a finding is severe."""
    limits: Annotated[
        Mapping[str, LimitSection | None], BeforeValidator(with_default_limits), AfterValidator(check_names)
    ] = DEFAULT_LIMITS
    """Limits of metrics besides the usual ones. For example: {actor/grad_norm: {max: 5.0}, actor/entropy:
    null}
    """
