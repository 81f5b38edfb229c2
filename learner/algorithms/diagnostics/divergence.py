"""Divergence of the behaviour policy from the one being trained (pure), under verl's names.

All functions take one whole batch; over data-parallel ranks means are averaged by token count, and names with
`max` or `min` reduced that way.

Shapes: N packed positions.
"""

from __future__ import annotations

import torch

from learner.algorithms.correction.weights import batch_norm_factor, bound_weights, raw_weights
from learner.algorithms.presets import Correction
from learner.algorithms.rows import (
    EPSILON,
    Rows,
    clamp_log_ratio,
    masked_max,
    masked_mean,
    masked_min,
)

Metrics = dict[str, float]


def off_policy_metrics(
    prox_N: torch.Tensor, behaviour_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows
) -> Metrics:
    """Return KL, perplexities and chi-square of prox against behaviour; a row without tokens is equal."""
    delta_N = prox_N - behaviour_N
    prox_R, behaviour_R = rows.mean(prox_N, mask_N), rows.mean(behaviour_N, mask_N)
    difference_R = behaviour_R - prox_R
    sum_R = rows.sum(delta_N, mask_N)
    return _floats(
        {
            "kl": masked_mean(-delta_N, mask_N),
            "k3_kl": masked_mean(delta_N.exp() - delta_N - 1, mask_N),
            "training_ppl": (-prox_R).exp().mean(),
            "training_log_ppl": (-prox_R).mean(),
            "rollout_ppl": (-behaviour_R).exp().mean(),
            "rollout_log_ppl": (-behaviour_R).mean(),
            "log_ppl_diff": difference_R.mean(),
            "log_ppl_abs_diff": difference_R.abs().mean(),
            "log_ppl_diff_max": difference_R.max(),
            "log_ppl_diff_min": difference_R.min(),
            "ppl_ratio": difference_R.exp().mean(),
            "chi2_token": masked_mean((2 * clamp_log_ratio(delta_N)).exp(), mask_N) - 1,
            "chi2_seq": (2 * clamp_log_ratio(sum_R)).exp().mean() - 1,
        }
    )


def importance_metrics(
    delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, correction: Correction
) -> Metrics:
    """Return mean, extremes and effective sample size of the weights of `correction`."""
    assert correction.level is not None, "this correction has no weights"
    raw_N = raw_weights(delta_N, mask_N, rows, correction.level)
    weights_N = bound_weights(raw_N, mask_N, correction)
    lower = correction.lower if correction.lower is not None else 1 / correction.upper
    is_token = correction.level == "token"
    # Of a row's one ratio verl takes the share of rows, not of tokens; an empty row has ratio 1.
    ratio = raw_N if is_token else _row_ratio(delta_N, mask_N, rows, correction.level)
    valid = mask_N if is_token else torch.ones_like(ratio)
    shown = weights_N if is_token else ratio
    mean = masked_mean(weights_N, mask_N)
    variance = masked_mean(weights_N.square(), mask_N) - mean.square()
    size = 1 / masked_mean((weights_N / (mean + EPSILON)).square(), mask_N)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_max": masked_max(shown, valid),
        "rollout_is_min": masked_min(shown, valid),
        "rollout_is_std": variance.clamp(min=0).sqrt(),
        "rollout_is_eff_sample_size": size,
        "rollout_is_ratio_fraction_high": masked_mean((ratio > correction.upper).float(), valid),
        "rollout_is_ratio_fraction_low": masked_mean((ratio < lower).float(), valid),
    }
    metrics |= _row_metrics(rows.mean(weights_N, mask_N), rows.mean(raw_N, mask_N), lower, correction.upper)
    if correction.lower is not None:
        is_outside_N = (raw_N < correction.lower) | (raw_N > correction.upper)
        metrics["rollout_is_oob_ratio"] = masked_mean(is_outside_N.float(), mask_N)
    if correction.is_batch_normalized:
        factor = batch_norm_factor(weights_N, mask_N, rows, correction)
        metrics["rollout_is_batch_norm_factor"] = mean.new_tensor(factor)
    return _floats(metrics)


def _row_ratio(delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, level: str) -> torch.Tensor:
    log_ratio_R = (rows.sum if level == "sequence" else rows.mean)(delta_N, mask_N)
    return clamp_log_ratio(log_ratio_R).exp()


def _row_metrics(
    mean_R: torch.Tensor, raw_R: torch.Tensor, lower: float, upper: float
) -> dict[str, torch.Tensor]:
    return {
        "rollout_is_seq_mean": mean_R.mean(),
        "rollout_is_seq_std": mean_R.std() if len(mean_R) > 1 else mean_R.new_zeros(()),
        "rollout_is_seq_max": mean_R.max(),
        "rollout_is_seq_min": mean_R.min(),
        "rollout_is_seq_max_deviation": (mean_R - 1).abs().max(),
        "rollout_is_seq_fraction_high": (raw_R > upper).float().mean(),
        "rollout_is_seq_fraction_low": (raw_R < lower).float().mean(),
    }


def _floats(metrics: dict[str, torch.Tensor]) -> Metrics:
    """One transfer for all: on a GPU each `item` would wait for the device."""
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
