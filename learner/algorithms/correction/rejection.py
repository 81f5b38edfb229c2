"""Rejection: which tokens or rows are too far from the behaviour policy to train on (pure).

An option is a level and an estimator of the divergence, k1 = -delta, k2 = delta^2 / 2 or
k3 = e^delta - 1 - delta, with delta = log pi - log mu. verl's names and numbers: the bounds of k1 are
on mu / pi, the reciprocal of what its documentation says, so `0.9_2.0` rejects pi / mu = 1.5.
Rejecting changes the mask only; what the loss divides by is the caller's.

Shapes: N packed positions, R rows.
"""

from __future__ import annotations

import math

import torch

from learner.algorithms.presets import Rejection
from learner.algorithms.rows import Rows, clamp_log_ratio, masked, masked_max, masked_mean, masked_min


def keep_tokens(
    delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, rejections: tuple[Rejection, ...]
) -> torch.Tensor:
    """Return the mask without what any of the options rejects [N]."""
    for rejection in rejections:
        statistic_N = _statistic(delta_N.detach(), mask_N, rows, rejection.option)
        is_kept_N = (statistic_N >= rejection.lower) & (statistic_N <= rejection.upper)
        mask_N = mask_N * is_kept_N
    return mask_N


def reject(
    delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, rejections: tuple[Rejection, ...]
) -> torch.Tensor:
    """As `keep_tokens`, every option judged on the mask as it came in: what verl does."""
    kept_N = mask_N
    for rejection in rejections:
        kept_N = kept_N * keep_tokens(delta_N, mask_N, rows, (rejection,)).ne(0)
    return kept_N


def rejection_metrics(
    delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, rejections: tuple[Rejection, ...]
) -> dict[str, float]:
    """Return `rollout_rs_*` in verl's definitions; empty without an option."""
    metrics: dict[str, torch.Tensor] = {}
    if not rejections:
        return {}
    for rejection in rejections:
        found = _measure(delta_N.detach(), mask_N, rows, rejection)
        metrics |= {f"rollout_rs_{rejection.option}_{name}": value for name, value in found.items()}
    lost_N = mask_N - reject(delta_N, mask_N, rows, rejections)
    metrics["rollout_rs_masked_fraction"] = masked_mean(lost_N, mask_N)
    metrics["rollout_rs_seq_masked_fraction"] = (rows.sum(lost_N, mask_N) > 0).float().mean()
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


def _estimate(delta_N: torch.Tensor, option: str) -> torch.Tensor:
    if option.endswith("k1"):
        return -delta_N
    if option.endswith("k2"):
        return 0.5 * delta_N.square()
    bounded_N = clamp_log_ratio(delta_N)
    return bounded_N.exp() - 1 - bounded_N


def _row_statistic(delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, option: str) -> torch.Tensor:
    """Return the option's number of each row [R]; 0 for a row without tokens."""
    estimate_N = _estimate(delta_N, option)
    if option.startswith("seq_sum"):
        return rows.sum(estimate_N, mask_N)
    if option.startswith("seq_max"):
        return torch.where(rows.count(mask_N) > 0, rows.max(estimate_N, mask_N), 0.0)
    return rows.mean(estimate_N, mask_N)


def _statistic(delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, option: str) -> torch.Tensor:
    if option.startswith("token"):
        return _estimate(delta_N, option)
    return rows.spread(_row_statistic(delta_N, mask_N, rows, option))


def _measure(
    delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, rejection: Rejection
) -> dict[str, torch.Tensor]:
    """Return the metrics of one option. Those of rows leave out rows without tokens."""
    option, upper, lower = rejection.option, rejection.upper, rejection.lower
    is_token = option.startswith("token")
    statistic_N = _statistic(delta_N, mask_N, rows, option)
    is_filled_R = (rows.count(mask_N) > 0).float()
    row_R = _row_statistic(delta_N, mask_N, rows, option)
    values, valid = (statistic_N, mask_N) if is_token else (row_R, is_filled_R)
    bounded_N = statistic_N.clamp(lower if math.isfinite(lower) else 0.0, upper)
    variance = masked_mean(bounded_N.square(), mask_N) - masked_mean(bounded_N, mask_N).square()
    num_rows = is_filled_R.sum()
    row_mean = masked_mean(row_R, is_filled_R)
    row_variance = masked((row_R - row_mean).square(), is_filled_R).sum() / (num_rows - 1).clamp(min=1)
    lost_N = mask_N - keep_tokens(delta_N, mask_N, rows, (rejection,))
    metrics = {
        "mean": masked_mean(statistic_N, mask_N),
        "max": masked_max(values, valid),
        "min": masked_min(values, valid),
        "std": variance.clamp(min=0).sqrt(),
        "fraction_high": masked_mean((values > upper).float(), valid),
        "fraction_low": masked_mean((values < lower).float(), valid),
        "seq_mean": row_mean,
        "seq_std": row_variance.sqrt(),
        "seq_max": masked_max(row_R, is_filled_R),
        "seq_min": masked_min(row_R, is_filled_R),
        "seq_max_deviation": masked_max(row_R.abs(), is_filled_R),
        "seq_fraction_high": masked_mean((row_R > upper).float(), is_filled_R),
        "seq_fraction_low": masked_mean((row_R < lower).float(), is_filled_R),
        "masked_fraction": masked_mean(lost_N, mask_N),
        "seq_masked_fraction": masked_mean((rows.sum(lost_N, mask_N) > 0).float(), is_filled_R),
    }
    if not option.endswith("k1"):
        del metrics["seq_fraction_low"]
    return metrics
