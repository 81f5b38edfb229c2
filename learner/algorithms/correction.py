"""Off-policy correction: importance weights and the row veto (pure).

delta is the log-ratio to the behaviour policy: prox - behaviour (decoupled: weights made once per
step, multiplied into the clipped loss around prox) or current - behaviour (bypass: the behaviour
policy is the centre of the clip, no extra forward pass). Weights never carry a gradient.

Shapes: N packed positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from learner.algorithms.rows import EPSILON, Rows, clamp_log_ratio, masked, masked_mean

VETO_OFF = 0.0


@dataclass(frozen=True)
class Correction:
    """One way to correct.

    Attributes:
        is_bypass: The behaviour policy takes the place of the proximal one.
        level: Weight per token, per sequence, or none.
        upper: Weights above are cut to it, or set to 0 if there is a lower bound (IcePop, MIS).
        lower: Weights below are set to 0; None truncates only (TIS).
        is_batch_normalized: Divide the weights by their mean.
    """

    is_bypass: bool = False
    level: Literal["token", "sequence"] | None = None
    upper: float = 2.0
    lower: float | None = None
    is_batch_normalized: bool = False


def make_corrections(is_threshold: float) -> dict[str, Correction]:
    """Return the presets by verl's names; `is_threshold` is C of the truncating ones."""
    return {
        "disabled": Correction(),
        "decoupled_token_is": Correction(level="token", upper=is_threshold),
        "decoupled_seq_is": Correction(level="sequence", upper=is_threshold),
        "decoupled_token_icepop": Correction(level="token", lower=0.5, upper=5.0),
        "decoupled_token_mis": Correction(level="token", lower=1 / 5, upper=5.0),
        "decoupled_seq_mis": Correction(level="sequence", lower=1 / 5, upper=5.0),
        "bypass_ppo_clip": Correction(is_bypass=True),
        "bypass_pg_is": Correction(is_bypass=True, level="token", upper=is_threshold),
        "bypass_pg_token_icepop": Correction(is_bypass=True, level="token", lower=0.5, upper=5.0),
    }


def raw_weights(delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, level: str) -> torch.Tensor:
    """Return exp(delta) of each token, or of its whole row, before any bound [N]."""
    if level == "sequence":
        delta_N = rows.spread(rows.sum(delta_N, mask_N))
    return clamp_log_ratio(delta_N).exp()


def importance_weights(
    delta_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, correction: Correction
) -> torch.Tensor:
    """Return the bounded weights [N], 0 outside the mask; arXiv 2505.24298."""
    assert correction.level is not None, "this correction has no weights"
    weights_N = masked(raw_weights(delta_N.detach(), mask_N, rows, correction.level), mask_N)
    if correction.lower is None:
        weights_N = weights_N.clamp(max=correction.upper)
    else:
        is_inside_N = (weights_N >= correction.lower) & (weights_N <= correction.upper)
        weights_N = torch.where(is_inside_N, weights_N, 0.0)
    if not correction.is_batch_normalized:
        return weights_N
    mean = _mean_weight(weights_N, mask_N, rows, correction.level)
    return weights_N / mean if mean > EPSILON else weights_N


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


def _mean_weight(weights_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, level: str) -> torch.Tensor:
    if level == "token":
        return masked_mean(weights_N, mask_N)
    is_filled_R = (rows.count(mask_N) > 0).float()
    return (rows.mean(weights_N, mask_N) * is_filled_R).sum() / is_filled_R.sum().clamp(min=EPSILON)
