"""Variances and correlations out of means, which parts of a batch may have taken each by itself (pure).

Invariant: the moments of two parts, averaged by the parts' numbers of values, are those of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

Moments = dict[str, float]
_EXPLAINED_EPSILON = 1e-5


def value_moments(returns: torch.Tensor, values: torch.Tensor) -> Moments:
    """Return what `explained_variance` is made from; both [any number of values]."""
    returns, values = returns.double(), values.double()
    return _moments({"returns": returns, "value_errors": returns - values})


def explained_variance(moments: Mapping[str, float], num_values: float) -> float:
    """Return 1 - var(returns - values) / (var(returns) + 1e-5), unbiased variances."""
    unexplained = _variance(moments, "value_errors", num_values)
    return 1.0 - unexplained / (_variance(moments, "returns", num_values) + _EXPLAINED_EPSILON)


def probability_moments(trainer: torch.Tensor, sampler: torch.Tensor) -> Moments:
    """Return what `probability_spread` is made from: two columns of probabilities."""
    trainer, sampler = trainer.double(), sampler.double()
    columns = {"probs_diff": (trainer - sampler).abs(), "trainer": trainer, "sampler": sampler}
    return _moments(columns) | {"trainer_sampler": float((trainer * sampler).mean())}


def probability_spread(moments: Mapping[str, float], num_values: float) -> Moments:
    """Return the deviation of the difference in probability, and the correlation of the two."""
    covariance = moments["trainer_sampler"] - moments["trainer"] * moments["sampler"]
    variances = [_variance(moments, column, num_values) for column in ("trainer", "sampler")]
    scale = math.sqrt(variances[0] * variances[1])
    return {
        "rollout_probs_diff_std": math.sqrt(_variance(moments, "probs_diff", num_values)),
        "rollout_actor_probs_pearson_corr": covariance * _unbiased(num_values) / scale
        if scale > 0
        else math.nan,
    }


def _moments(columns: Mapping[str, torch.Tensor]) -> Moments:
    means = {column: float(values.mean()) for column, values in columns.items()}
    return means | {f"{column}_squared": float(values.square().mean()) for column, values in columns.items()}


def _variance(moments: Mapping[str, float], column: str, num_values: float) -> float:
    """Return the unbiased variance; NaN of fewer than two values."""
    if num_values < 2:
        return math.nan
    return max(0.0, moments[f"{column}_squared"] - moments[column] ** 2) * _unbiased(num_values)


def _unbiased(num_values: float) -> float:
    return num_values / (num_values - 1) if num_values > 1 else math.nan
