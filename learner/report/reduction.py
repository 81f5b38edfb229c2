"""From the values of updates and ranks to those of the step, by the rules of `asyncrl.metrics`.

Invariant: a metric of two data-parallel ranks is the metric of their rows together, whatever their
shares weigh.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from asyncrl import metrics as names

_COUNTED = "counted tokens"
_EXPLAINED_EPSILON = 1e-5


class Reducer(Protocol):
    """Of a backend, what reduces: see `learner.backend.LearnerBackend`."""

    @property
    def dp_size(self) -> int: ...

    def reduce(self, metrics: Mapping[str, float], weight: float) -> dict[str, float]: ...


def merge_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each metric over the optimizer updates of a step: its maximum, minimum or mean."""
    return {
        name: _combine(name, [update[name] for update in updates]) for name in (updates[0] if updates else {})
    }


def reduce_over_ranks(backend: Reducer, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
    """Return the metrics of the whole step on every rank. Collective.

    Args:
        backend: Whose data-parallel ranks take part.
        metrics: Of this rank's share; the same names on every rank. `weight/<over>` says how much the share
            weighs in means over `<over>`; a `moment/` becomes the variance or correlation it is for.
        weight: Tokens of the share that count in the loss, for all other means.

    Metrics without a value (the mean of no trained token) are left out.
    """
    weights = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("weight/")}
    by_over: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        if not name.startswith("weight/"):
            by_over[_over(name, weights)][name] = value
    reduced: dict[str, float] = {}
    for over, found in sorted(by_over.items()):
        reduced |= _reduce(backend, found, weights.get(over, 1.0 if over == "ranks" else weight))
    totals = _reduce(backend, weights, 1.0)
    num_trained = totals.get("trained tokens", 0.0) * backend.dp_size
    for name in reduced:
        metric = names.find(name)
        if metric is not None and metric.reduction == "sum":
            reduced[name] *= backend.dp_size
    return _finish(reduced, num_trained)


def _combine(name: str, values: Sequence[float]) -> float:
    match names.extreme_of(name):
        case "max":
            return float(np.max(values))  # of numpy: a NaN among them must be seen
        case "min":
            return float(np.min(values))
        case None:
            return float(np.mean(values))


def _over(name: str, weights: Mapping[str, float]) -> str:
    """Return what `name` is averaged over, as far as the step says how much its share weighs there."""
    if name.startswith("moment/"):
        return "trained tokens"
    metric = names.find(name)
    if metric is None:
        return _COUNTED
    if metric.reduction == "sum" or metric.over == "ranks":
        return "ranks"
    return metric.over if metric.over in weights else _COUNTED


def _reduce(backend: Reducer, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
    return dict(metrics) if backend.dp_size == 1 else backend.reduce(metrics, weight)


def _finish(reduced: dict[str, float], num_trained: float) -> dict[str, float]:
    moments = {name: value for name, value in reduced.items() if name.startswith("moment/")}
    found = {name: value for name, value in reduced.items() if name not in moments}
    found |= _combine_moments({name.partition("/")[2]: value for name, value in moments.items()}, num_trained)
    return {name: value for name, value in found.items() if math.isfinite(value) or not _may_be_absent(name)}


def _combine_moments(moments: Mapping[str, float], num_values: float) -> dict[str, float]:
    def variance(column: str) -> float:
        return _variance(moments[column], moments[f"{column}_squared"], num_values)

    found: dict[str, float] = {}
    if "value_errors" in moments:
        unexplained = variance("value_errors") / (variance("returns") + _EXPLAINED_EPSILON)
        found["critic/vf_explained_var"] = 1.0 - unexplained
    if "probs_diff" in moments:
        covariance = moments["trainer_sampler"] - moments["trainer"] * moments["sampler"]
        covariance *= _unbiased(num_values)
        scale = math.sqrt(variance("trainer") * variance("sampler"))
        found["training/rollout_probs_diff_std"] = math.sqrt(variance("probs_diff"))
        found["training/rollout_actor_probs_pearson_corr"] = covariance / scale if scale > 0 else math.nan
    return found


def _variance(mean: float, mean_squared: float, num_values: float) -> float:
    """Return the unbiased variance; NaN of fewer than two values."""
    if num_values < 2:
        return math.nan
    return max(0.0, mean_squared - mean**2) * _unbiased(num_values)


def _unbiased(num_values: float) -> float:
    return num_values / (num_values - 1) if num_values > 1 else math.nan


def _may_be_absent(name: str) -> bool:
    """A loss that is not a number must be seen; a mean over nothing says nothing."""
    metric = names.find(name)
    if metric is None:
        return False
    return metric.reduction in ("max", "min") or metric.over in ("rows", "answered rows", "trained tokens")
