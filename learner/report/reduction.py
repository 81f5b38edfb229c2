"""Reduction of values from updates and ranks to those of the step, by the rules of `asyncrl.core.metrics`.

Invariant: a metric of two data-parallel ranks is the metric of their rows together, whatever their
shares weigh.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from asyncrl.core import metrics as names
from learner.algorithms.diagnostics.moments import explained_variance, probability_spread
from learner.algorithms.diagnostics.summary import signal_and_noise

_COUNTED = "counted tokens"
_MAY_BE_NOTHING = (
    "rows",
    "answered rows",
    "trained tokens",
    "tokens in bound",
    "current tokens",
    "checked tokens",
)


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
        backend: Its data-parallel ranks take part.
        metrics: Of this rank's share; the same names on every rank. `weight/<over>` says how much the share
            weighs in means over `<over>`; a `moment/` becomes the variance or correlation it is for.
        weight: Tokens of the share that count in the loss, for all other means.

    They keep their order. Metrics without a value (the mean of no trained token) are left out.
    """
    weights = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("weight/")}
    by_over: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        if not name.startswith("weight/"):
            by_over[_over(name, weights)][name] = value
    reduced: dict[str, float] = {}
    for over, found in sorted(by_over.items()):
        reduced |= _reduce(backend, found, weights.get(over, 1.0 if over == "ranks" else weight))
    totals = {over: mean * backend.dp_size for over, mean in _reduce(backend, weights, 1.0).items()}
    for name in reduced:
        metric = names.find(name)
        if metric is not None and metric.reduction == "sum":
            reduced[name] *= backend.dp_size
    found = _finish(reduced, totals)
    return {name: found[name] for name in dict.fromkeys([*metrics, *found]) if name in found}


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
        return name.split("/")[1]
    metric = names.find(name)
    if metric is None:
        return _COUNTED
    if metric.reduction == "sum" or metric.over == "ranks":
        return "ranks"
    return metric.over if metric.over in weights else _COUNTED


def _reduce(backend: Reducer, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
    return dict(metrics) if backend.dp_size == 1 else backend.reduce(metrics, weight)


def _finish(reduced: dict[str, float], totals: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics row: moments become what they are for, values over nothing are left out."""
    found = {name: value for name, value in reduced.items() if not name.startswith("moment/")}
    for over, num_values in totals.items():
        prefix = f"moment/{over}/"
        moments = {
            name.removeprefix(prefix): value for name, value in reduced.items() if name.startswith(prefix)
        }
        if "value_errors" in moments:
            found["critic/vf_explained_var"] = explained_variance(moments, num_values)
        if "probs_diff" in moments:
            spread = probability_spread(moments, num_values)
            found |= {f"training/{name}": value for name, value in spread.items()}
        if "power" in moments:
            found |= signal_and_noise(moments, reduced["actor/grad_norm"], num_values)
    return {name: value for name, value in found.items() if math.isfinite(value) or not _may_be_absent(name)}


def _may_be_absent(name: str) -> bool:
    """A loss that is not a number must be seen; a mean over nothing says nothing."""
    metric = names.find(name)
    if metric is None:
        return False
    return metric.reduction in ("max", "min") or metric.over in _MAY_BE_NOTHING
