"""Input and output of a policy loss, and the loss of a critic (pure).

Shapes: N packed positions, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from learner.algorithms.rows import Rows


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio: 1 - low .. 1 + high, and `dual` for negative advantages (arXiv 1912.09729).

    In `geo_mean` the bounds are of the log-ratio, in `dppo_tv` and `dppo_kl` of the divergence.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float = 3.0


@dataclass(frozen=True)
class LossConstants:
    """Constants of single losses, with their papers' values.

    Attributes:
        cov_ratio: Share of tokens that clip_cov and kl_cov single out; arXiv 2505.22617.
        cov_low, cov_high: Covariances between which clip_cov draws.
        cov_kl_coef: Weight of |log-ratio| on the tokens that kl_cov singles out.
        tau_pos, tau_neg: Steepness of sapo's gate by the sign of the advantage; arXiv 2511.20347.
        dro_beta: Weight of dro's squared log-ratio.
        m2po_budget: Mean squared log-ratio that m2po leaves; arXiv 2510.01161.
    """

    cov_ratio: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    dro_beta: float = 0.1
    m2po_budget: float = 0.04


@dataclass(frozen=True)
class LossInput:
    """Input of a loss.

    Attributes:
        logprobs_N: Under the weights being trained; carries the gradient.
        old_N: The proximal log-probs: the centre of the trust region.
        advantages_N: No gradient.
        mask_N: Tokens that are trained.
        rows: Rows of the part, all whole.
        clip: Bounds of the ratio.
        constants: Of single losses.
        weights_N: Importance weights. The caller multiplies them into `loss_N`; a loss that puts out
            `loss_R` must do so itself.
        behaviour_N: The sampler's log-probs, for m2po; `old_N` if not given.
        seed: For losses that draw tokens: the same number gives the same draw.
    """

    logprobs_N: torch.Tensor
    old_N: torch.Tensor
    advantages_N: torch.Tensor
    mask_N: torch.Tensor
    rows: Rows
    clip: Clip = Clip()
    constants: LossConstants = LossConstants()
    weights_N: torch.Tensor | None = None
    behaviour_N: torch.Tensor | None = None
    seed: int = 0


@dataclass(frozen=True)
class TokenLoss:
    """Loss per token, and metrics per token whose mean over the trained tokens is logged.

    Attributes:
        loss_N: Loss of each token.
        metrics: Per token.
        loss_R: If given, the loss of each row, weighted, in place of `loss_N`: their mean is minimised.
        aggregation: If given, the only mode that this loss is defined for.
    """

    loss_N: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_R: torch.Tensor | None = None
    aggregation: str | None = None


PolicyLossFn = Callable[[LossInput], TokenLoss]


def value_loss(
    values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float
) -> TokenLoss:
    """Return a critic's loss: half the squared error, clipped around the old prediction; arXiv 1707.06347.

    Args:
        values_N: Of the critic being trained; carries the gradient.
        old_values_N: At the start of the step, from which the returns were made.
        returns_N: Target of the prediction.
        clip: Distance from the old prediction within which an improvement counts.
    """
    bounded_N = torch.minimum(torch.maximum(values_N, old_values_N - clip), old_values_N + clip)
    plain_N, clipped_N = (values_N - returns_N).square(), (bounded_N - returns_N).square()
    loss_N = 0.5 * torch.maximum(plain_N, clipped_N)
    return TokenLoss(loss_N, {"critic/vf_clipfrac": (clipped_N > plain_N).float()})
