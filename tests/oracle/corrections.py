"""Adapters of importance weights, rejection and the off-policy metrics."""

from __future__ import annotations

from typing import Any

import torch

from learner.algorithms.correction import (
    Correction,
    importance_weights,
    parse_rejections,
    reject,
    rejection_metrics,
)
from learner.algorithms.diagnostics.divergence import (
    importance_metrics,
    off_policy_metrics,
)
from learner.algorithms.diagnostics.moments import probability_moments, probability_spread
from learner.algorithms.rows import Rows
from tests.oracle.layout import lay_out

Given = dict[str, Any]
Found = dict[str, Any]


def read_correction(x: Given) -> Correction:
    """Return ours from verl's options."""
    threshold = x.get("rollout_is_threshold", 2.0)
    lower, upper = (
        map(float, threshold.split("_")) if isinstance(threshold, str) else (None, float(threshold))
    )
    return Correction(
        level=x.get("rollout_is"),
        upper=upper,
        lower=lower,
        is_batch_normalized=x.get("rollout_is_batch_normalize", False),
        rejection=parse_rejections(x.get("rollout_rs", ""), x.get("rollout_rs_threshold", "")),
    )


def describe_correction(
    prox_N: torch.Tensor, behaviour_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, correction: Correction
) -> Found:
    """Return all `rollout_corr/*` as one of verl's calls does."""
    delta_N = prox_N - behaviour_N
    kept_N = reject(delta_N, mask_N, rows, correction.rejection)
    found = (
        importance_metrics(delta_N, mask_N, rows, correction)
        | rejection_metrics(delta_N, mask_N, rows, correction.rejection)
        | off_policy_metrics(prox_N, behaviour_N, mask_N, rows)
    )
    assert kept_N.shape == mask_N.shape
    return {f"metric:rollout_corr/{name}": value for name, value in found.items()}


def weights(x: Given, *, is_packed: bool = False) -> Found:
    layout, correction = lay_out(x["response_mask"], is_packed=is_packed), read_correction(x)
    arguments = layout.flat(x["log_ratio"]), layout.flat(x["response_mask"]), layout.rows, correction
    metrics = {f"metric:{name}": value for name, value in importance_metrics(*arguments).items()}
    return {"weights": layout.back(importance_weights(*arguments)), **metrics}


def rejection(x: Given, *, is_packed: bool = False) -> Found:
    layout, correction = lay_out(x["response_mask"], is_packed=is_packed), read_correction(x)
    arguments = layout.flat(x["log_ratio"]), layout.flat(x["response_mask"]), layout.rows
    metrics = rejection_metrics(*arguments, correction.rejection)
    named = {f"metric:{name}": value for name, value in metrics.items()}
    return {"mask": layout.back(reject(*arguments, correction.rejection)), **named}


def whole_correction(x: Given) -> Found:
    layout, correction = lay_out(x["response_mask"]), read_correction(x)
    prox_N, behaviour_N = layout.flat(x["old_log_prob"]), layout.flat(x["rollout_log_prob"])
    mask_N = layout.flat(x["response_mask"])
    delta_N = prox_N - behaviour_N
    return {
        "weights": layout.back(importance_weights(delta_N, mask_N, layout.rows, correction)),
        "mask": layout.back(reject(delta_N, mask_N, layout.rows, correction.rejection)),
        **describe_correction(prox_N, behaviour_N, mask_N, layout.rows, correction),
    }


def off_policy(x: Given, *, is_packed: bool = False) -> Found:
    layout = lay_out(x["response_mask"], is_packed=is_packed)
    found = off_policy_metrics(
        layout.flat(x["old_log_prob"]),
        layout.flat(x["rollout_log_prob"]),
        layout.flat(x["response_mask"]),
        layout.rows,
    )
    return {f"metric:{name}": value for name, value in found.items()}


def compare_probabilities(
    prox_N: torch.Tensor, behaviour_N: torch.Tensor, mask_N: torch.Tensor
) -> dict[str, float]:
    """Return what the parts of a batch tell together, as `reduce_over_ranks` puts them together."""
    is_in_N = mask_N != 0
    trainer, sampler = prox_N[is_in_N].exp(), behaviour_N[is_in_N].exp()
    moments = probability_moments(trainer, sampler)
    return {
        "rollout_probs_diff_valid": 1.0,
        "rollout_probs_diff_max": float((trainer - sampler).abs().max()),
        "rollout_probs_diff_mean": moments["probs_diff"],
        **probability_spread(moments, len(trainer)),
    }


def probabilities(x: Given) -> Found:
    found = compare_probabilities(
        *(x[name].reshape(-1) for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    )
    return {f"metric:training/{name}": value for name, value in found.items()}
