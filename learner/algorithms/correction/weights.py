"""Importance weights, the row veto, and proximal log-probs without a forward pass (pure).

delta is the log-ratio to the behaviour policy: prox - behaviour (decoupled: weights made once per
step, multiplied into the clipped loss around prox) or current - behaviour (bypass: the behaviour
policy is the centre of the clip, no extra forward pass). Weights never carry a gradient.

Shapes: N packed positions.
"""

from __future__ import annotations

import torch

from learner.algorithms.presets import Correction
from learner.algorithms.rows import EPSILON, Rows, Sum, clamp_log_ratio, masked

VETO_OFF = 0.0


def raw_weights(delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, level: str) -> torch.Tensor:
    """Return exp(delta) of each token, or of its whole row, before any bound [N]."""
    if level == "sequence":
        delta_N = rows.spread(rows.sum(delta_N, mask_N))
    elif level == "geometric":
        delta_N = rows.spread(rows.mean(delta_N, mask_N))
    return clamp_log_ratio(delta_N).exp()


def importance_weights(
    delta_N: torch.Tensor,
    mask_N: torch.Tensor,
    rows: Rows,
    correction: Correction,
    over_ranks: Sum = lambda totals: totals,
) -> torch.Tensor:
    """Return the bounded weights [N], 0 outside the mask; arXiv 2505.24298."""
    weights_N = bounded_weights(delta_N, mask_N, rows, correction)
    if not correction.is_batch_normalized:
        return weights_N
    return weights_N / batch_norm_factor(weights_N, mask_N, rows, correction, over_ranks)


def bounded_weights(
    delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, correction: Correction
) -> torch.Tensor:
    """Return the weights after truncation or masking, before any normalization [N]."""
    assert correction.level is not None, "this correction has no weights"
    return bound_weights(raw_weights(delta_N.detach(), mask_N, rows, correction.level), mask_N, correction)


def bound_weights(raw_N: torch.Tensor, mask_N: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Return what `raw_weights` gave after truncation or masking, 0 outside the mask [N]."""
    weights_N = masked(raw_N, mask_N)
    if correction.lower is None:
        return weights_N.clamp(max=correction.upper)
    is_inside_N = (weights_N >= correction.lower) & (weights_N <= correction.upper)
    return torch.where(is_inside_N, weights_N, 0.0)


def batch_norm_factor(
    weights_N: torch.Tensor,
    mask_N: torch.Tensor,
    rows: Rows,
    correction: Correction,
    over_ranks: Sum = lambda totals: totals,
) -> float:
    """Return the mean weight, over tokens or over rows that have one; 1 if it is next to nothing."""
    if correction.level == "token":
        parts = torch.stack([masked(weights_N, mask_N).sum(), mask_N.sum()])
    else:
        is_filled_R = (rows.count(mask_N) > 0).float()
        parts = torch.stack([(rows.mean(weights_N, mask_N) * is_filled_R).sum(), is_filled_R.sum()])
    total, count = over_ranks(parts).tolist()
    mean = float(total / max(count, EPSILON))
    return mean if mean > EPSILON else 1.0


def veto_rows(delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, threshold: float) -> torch.Tensor:
    """Return the mask with every row zeroed in which a valid token has exp(delta) < threshold.

    Such a token is one that the target policy would all but never sample: numerics or a wrong
    record, not staleness. A threshold of 0 turns the veto off.
    """
    if threshold == VETO_OFF:
        return mask_N
    is_absurd_N = clamp_log_ratio(delta_N.detach()).exp() < threshold
    is_kept_R = rows.sum(is_absurd_N.float(), mask_N) == 0
    return mask_N * rows.spread(is_kept_R)


def interpolate_prox(
    logprobs_N: torch.Tensor, behaviour_N: torch.Tensor, lag_N: torch.Tensor
) -> torch.Tensor:
    """Return behaviour + alpha (current - behaviour), without gradient; arXiv 2512.06547 (A-3PO).

    The weights being trained are on their way to version v, the proximal ones are v - 1, the sampler's
    v_b: alpha = (v - 1 - v_b) / (v - v_b) = lag / (lag + 1). A token of lag 0 was sampled by the
    proximal policy itself.

    Args:
        logprobs_N: Of the weights being trained.
        behaviour_N: The sampler's.
        lag_N: v - 1 - v_b of the version that sampled each token.
    """
    lag_N = lag_N.to(logprobs_N.dtype)
    alpha_N = lag_N / (lag_N + 1)
    return (behaviour_N + alpha_N * (logprobs_N.detach() - behaviour_N)).detach()
