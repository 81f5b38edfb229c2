"""Policy losses per token (pure).

A loss takes a `LossInput` and returns a `TokenLoss`. Importance weights and aggregation come after it,
the same for all. Log-probs, ratios and losses are float32.

Shapes: N packed positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from learner.algorithms.rows import Rows, clamp_log_ratio


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio: 1 - low .. 1 + high, and `dual` for negative advantages (arXiv 1912.09729)."""

    low: float = 0.2
    high: float = 0.28
    dual: float = 3.0


@dataclass(frozen=True)
class LossInput:
    """What a loss reads.

    Attributes:
        logprobs_N: Under the weights being trained; carries the gradient.
        old_N: The proximal log-probs: the centre of the trust region.
        advantages_N: No gradient.
        mask_N: Tokens that are trained.
        rows: Rows of the part, all whole.
        clip: Bounds of the ratio.
    """

    logprobs_N: torch.Tensor
    old_N: torch.Tensor
    advantages_N: torch.Tensor
    mask_N: torch.Tensor
    rows: Rows
    clip: Clip = Clip()


@dataclass(frozen=True)
class TokenLoss:
    """Loss per token, and metrics per token whose mean over the trained tokens is logged."""

    loss_N: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


PolicyLossFn = Callable[[LossInput], TokenLoss]


def vanilla(x: LossInput) -> TokenLoss:
    """PPO's clipped loss with asymmetric and dual clip; arXiv 1707.06347, 1912.09729, 2503.14476."""
    log_ratio_N = x.logprobs_N - x.old_N
    ratio_N = clamp_log_ratio(log_ratio_N).exp()
    plain_N = -x.advantages_N * ratio_N
    bounded_N = -x.advantages_N * ratio_N.clamp(1 - x.clip.low, 1 + x.clip.high)
    clipped_N = torch.maximum(plain_N, bounded_N)
    ceiling_N = -x.advantages_N * x.clip.dual
    is_negative_N = x.advantages_N < 0
    loss_N = torch.where(is_negative_N, torch.minimum(clipped_N, ceiling_N), clipped_N)
    metrics = {
        "actor/pg_clipfrac": (bounded_N > plain_N).float(),
        "actor/pg_clipfrac_lower": ((clipped_N > ceiling_N) & is_negative_N).float(),
        "actor/ppo_kl": -log_ratio_N.detach(),
    }
    return TokenLoss(loss_N, metrics)


def gspo(x: LossInput) -> TokenLoss:
    """One ratio per sequence, gradient per token; arXiv 2507.18071. Aggregate by seq-mean-token-mean."""
    log_ratio_N = x.logprobs_N - x.old_N
    mean_R = x.rows.sum(log_ratio_N, x.mask_N) / x.rows.count(x.mask_N).clamp(min=1)
    log_sequence_N = x.logprobs_N - x.logprobs_N.detach() + x.rows.spread(mean_R.detach())
    ratio_N = log_sequence_N.clamp(max=10.0).exp()
    plain_N = -x.advantages_N * ratio_N
    bounded_N = -x.advantages_N * ratio_N.clamp(1 - x.clip.low, 1 + x.clip.high)
    metrics = {"actor/pg_clipfrac": (bounded_N > plain_N).float(), "actor/ppo_kl": -log_ratio_N.detach()}
    return TokenLoss(torch.maximum(plain_N, bounded_N), metrics)


def cispo(x: LossInput) -> TokenLoss:
    """Clip the weight, never the gradient; arXiv 2506.13585."""
    log_ratio_N = x.logprobs_N - x.old_N
    ratio_N = clamp_log_ratio(log_ratio_N).exp().detach()
    clipped_N = ratio_N.clamp(1 - x.clip.low, 1 + x.clip.high)
    metrics = {"actor/pg_clipfrac": (clipped_N != ratio_N).float(), "actor/ppo_kl": -log_ratio_N.detach()}
    return TokenLoss(-clipped_N * x.advantages_N * x.logprobs_N, metrics)


def reinforce(x: LossInput) -> TokenLoss:
    """The plain policy gradient, for importance weights that multiply it."""
    metrics = {"actor/ppo_kl": -(x.logprobs_N - x.old_N).detach()}
    return TokenLoss(-x.advantages_N * x.logprobs_N, metrics)


POLICY_LOSSES: dict[str, PolicyLossFn] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": reinforce,
    "reinforce": reinforce,
}
