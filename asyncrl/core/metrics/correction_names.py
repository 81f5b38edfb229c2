"""Names of the off-policy diagnostics: sampler against trainer, weights, rejection."""

from __future__ import annotations

from asyncrl.core.metrics.metric import Metric, means

_PREFIX = "rollout_corr/"

_OFF_POLICY = [
    *means(
        "counted tokens",
        (f"{_PREFIX}kl", "nats", "Mean of behaviour minus prox log-prob (k1)"),
        (f"{_PREFIX}k3_kl", "nats", "Mean of exp(d) - d - 1, d = prox - behaviour"),
        (f"{_PREFIX}training_ppl", "1", "Mean over rows of exp(-mean prox log-prob)"),
        (f"{_PREFIX}training_log_ppl", "nats", "Mean over rows of -mean prox log-prob"),
        (f"{_PREFIX}rollout_ppl", "1", "Mean over rows of exp(-mean behaviour log-prob)"),
        (f"{_PREFIX}rollout_log_ppl", "nats", "Mean over rows of -mean behaviour log-prob"),
        (f"{_PREFIX}log_ppl_diff", "nats", "Mean over rows of mean behaviour minus mean prox log-prob"),
        (f"{_PREFIX}log_ppl_abs_diff", "nats", "Mean over rows of the absolute difference of both means"),
        (f"{_PREFIX}ppl_ratio", "1", "Mean over rows of exp(mean behaviour - mean prox log-prob)"),
        (
            f"{_PREFIX}chi2_token",
            "1",
            "Mean of exp(2 (prox - behaviour)) - 1: chi-square divergence per token",
        ),
        (f"{_PREFIX}chi2_seq", "1", "Mean over rows of exp(2 sum(prox - behaviour)) - 1"),
        (f"{_PREFIX}empty_batch", "share", "Data-parallel ranks without a trained token"),
        (f"{_PREFIX}vetoed_share", "share", "Trained tokens in rows that the veto removed"),
    ),
    Metric(
        f"{_PREFIX}log_ppl_diff_max",
        "nats",
        "Largest mean behaviour minus mean prox log-prob of a row",
        "max",
    ),
    Metric(
        f"{_PREFIX}log_ppl_diff_min",
        "nats",
        "Smallest mean behaviour minus mean prox log-prob of a row",
        "min",
    ),
]

_IMPORTANCE = [
    *means(
        "counted tokens",
        (f"{_PREFIX}rollout_is_mean", "1", "Mean importance weight"),
        (f"{_PREFIX}rollout_is_std", "1", "Standard deviation of the truncated weights"),
        (
            f"{_PREFIX}rollout_is_eff_sample_size",
            "share",
            "1 / mean((w / mean w)^2) of the truncated weights",
        ),
        (f"{_PREFIX}rollout_is_ratio_fraction_high", "share", "Raw weights above the upper bound"),
        (
            f"{_PREFIX}rollout_is_ratio_fraction_low",
            "share",
            "Raw weights below the lower bound, or 1 / upper",
        ),
        (f"{_PREFIX}rollout_is_oob_ratio", "share", "Weights outside the bounds, set to 0 (IcePop)"),
        (f"{_PREFIX}rollout_is_batch_norm_factor", "1", "Mean weight that all weights were divided by"),
        (f"{_PREFIX}rollout_is_seq_mean", "1", "Mean over rows of the row's mean weight"),
        (f"{_PREFIX}rollout_is_seq_std", "1", "Standard deviation over rows of the row's mean weight"),
        (
            f"{_PREFIX}rollout_is_seq_fraction_high",
            "share",
            "Rows whose mean raw weight is above the upper bound",
        ),
        (
            f"{_PREFIX}rollout_is_seq_fraction_low",
            "share",
            "Rows whose mean raw weight is below the lower bound",
        ),
    ),
    Metric(
        f"{_PREFIX}rollout_is_max", "1", "Largest weight; token level: as used, sequence level: raw", "max"
    ),
    Metric(
        f"{_PREFIX}rollout_is_min", "1", "Smallest weight; token level: as used, sequence level: raw", "min"
    ),
    Metric(f"{_PREFIX}rollout_is_seq_max", "1", "Largest mean weight of a row", "max"),
    Metric(f"{_PREFIX}rollout_is_seq_min", "1", "Smallest mean weight of a row", "min"),
    Metric(
        f"{_PREFIX}rollout_is_seq_max_deviation", "1", "Largest distance of a row's mean weight from 1", "max"
    ),
]

_REJECTED = f"{_PREFIX}rollout_rs_<option>_"
_REJECTION = [
    *means(
        "counted tokens",
        (f"{_REJECTED}mean", "nats", "Mean of the option's statistic"),
        (f"{_REJECTED}std", "nats", "Standard deviation of the statistic"),
        (f"{_REJECTED}fraction_high", "share", "Statistics above the upper bound"),
        (f"{_REJECTED}fraction_low", "share", "Statistics below the lower bound"),
        (f"{_REJECTED}seq_mean", "nats", "Mean over rows of the row's statistic"),
        (f"{_REJECTED}seq_std", "nats", "Standard deviation over rows of the row's statistic"),
        (f"{_REJECTED}seq_fraction_high", "share", "Rows whose statistic is above the upper bound"),
        (f"{_REJECTED}seq_fraction_low", "share", "Rows whose statistic is below the lower bound"),
        (f"{_REJECTED}masked_fraction", "share", "Trained tokens that the option rejects"),
        (f"{_REJECTED}seq_masked_fraction", "share", "Rows in which the option rejects a token"),
        (f"{_PREFIX}rollout_rs_masked_fraction", "share", "Trained tokens that any option rejects"),
        (f"{_PREFIX}rollout_rs_seq_masked_fraction", "share", "Rows in which any option rejects a token"),
    ),
    Metric(f"{_REJECTED}max", "nats", "Largest statistic", "max"),
    Metric(f"{_REJECTED}min", "nats", "Smallest statistic", "min"),
    Metric(f"{_REJECTED}seq_max", "nats", "Largest statistic of a row", "max"),
    Metric(f"{_REJECTED}seq_min", "nats", "Smallest statistic of a row", "min"),
    Metric(f"{_REJECTED}seq_max_deviation", "nats", "Largest distance of a row's statistic from 0", "max"),
]

_PROBABILITIES = [
    Metric("training/rollout_probs_diff_valid", "1", "1 if the batch had a token to compare", "max"),
    Metric(
        "training/rollout_probs_diff_max", "1", "Largest |prox - behaviour| probability of a token", "max"
    ),
    *means(
        "tokens in bound",
        ("training/rollout_probs_diff_mean", "1", "Mean |prox - behaviour| probability of a token"),
        (
            "training/rollout_probs_diff_std",
            "1",
            "Unbiased standard deviation of |prox - behaviour| probability",
        ),
        ("training/rollout_actor_probs_pearson_corr", "1", "Correlation of prox and behaviour probabilities"),
    ),
]

CORRECTION = (*_OFF_POLICY, *_IMPORTANCE, *_REJECTION, *_PROBABILITIES)
