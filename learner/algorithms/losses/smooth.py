"""Policy losses that weigh tokens by a gate, a divergence or a penalty in place of a clip (pure).

Shapes: N packed positions.
"""

from __future__ import annotations

import torch

from learner.algorithms.losses.terms import LossInput, TokenLoss
from learner.algorithms.rows import EPSILON, clamp_log_ratio


def sapo(x: LossInput) -> TokenLoss:
    """A sigmoid gate around ratio 1, steeper for negative advantages; arXiv 2511.20347."""
    log_ratio_N = x.logprobs_N - x.old_N
    ratio_N = clamp_log_ratio(log_ratio_N).exp()
    tau_N = torch.where(x.advantages_N > 0, x.constants.tau_pos, x.constants.tau_neg)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * (4 / tau_N)
    nothing_N = torch.zeros_like(log_ratio_N)
    metrics = {
        "actor/pg_clipfrac": nothing_N,
        "actor/pg_clipfrac_lower": nothing_N,
        "actor/ppo_kl": -log_ratio_N.detach(),
    }
    return TokenLoss(-x.advantages_N * gate_N, metrics, aggregation="seq-mean-token-mean")


def dppo_tv(x: LossInput) -> TokenLoss:
    """Trust region by the change in probability of the token; arXiv 2602.04879."""
    change_N = (x.logprobs_N.exp() - x.old_N.exp()).detach()
    is_valid_N = torch.where(x.advantages_N > 0, change_N <= x.clip.high, change_N >= -x.clip.low)
    return _within(x, is_valid_N)


def dppo_kl(x: LossInput) -> TokenLoss:
    """Trust region by the KL of taking the token or not; arXiv 2602.04879.

    A token that moves back towards the old policy is always within.
    """
    new_N, old_N = x.logprobs_N.detach().exp(), x.old_N.exp()
    kept_N = ((1 - old_N + EPSILON) / (1 - new_N + EPSILON)).log()
    divergence_N = old_N * (x.old_N - x.logprobs_N.detach()) + (1 - old_N) * kept_N
    is_valid_N = torch.where(
        x.advantages_N > 0,
        (divergence_N <= x.clip.high) | (new_N <= old_N),
        (divergence_N <= x.clip.low) | (new_N >= old_N),
    )
    return _within(x, is_valid_N)


def dro(x: LossInput) -> TokenLoss:
    """Policy gradient with a quadratic penalty on the log-ratio; arXiv 2405.19107."""
    log_ratio_N = x.logprobs_N - x.old_N
    loss_N = -(x.advantages_N * x.logprobs_N - x.constants.dro_beta / 2 * log_ratio_N.square())
    return TokenLoss(loss_N, {"actor/ppo_kl": -log_ratio_N.detach()})


def _within(x: LossInput, is_valid_N: torch.Tensor) -> TokenLoss:
    """The gradient of valid tokens, weighted by a ratio that is cut at the dual bound."""
    log_ratio_N = x.logprobs_N - x.old_N
    ratio_N = clamp_log_ratio(log_ratio_N.detach()).exp().clamp(max=x.clip.dual)
    metrics = {
        "actor/pg_clipfrac": (~is_valid_N).float(),
        "actor/pg_clipfrac_lower": torch.zeros_like(ratio_N),
        "actor/ppo_kl": -log_ratio_N.detach(),
    }
    return TokenLoss(-x.advantages_N * ratio_N * x.logprobs_N * is_valid_N, metrics)
