"""The loss of a critic (pure).

Shapes: N packed positions.
"""

from __future__ import annotations

import torch

from learner.algorithms.losses.terms import TokenLoss


def value_loss(
    values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float
) -> TokenLoss:
    """Return half the squared error per token, clipped around the old prediction; arXiv 1707.06347.

    Args:
        values_N: Of the critic being trained; carries the gradient.
        old_values_N: At the start of the step, from which the returns were made.
        returns_N: What to predict.
        clip: How far from the old prediction an improvement counts.
    """
    bounded_N = torch.minimum(torch.maximum(values_N, old_values_N - clip), old_values_N + clip)
    plain_N, clipped_N = (values_N - returns_N).square(), (bounded_N - returns_N).square()
    loss_N = 0.5 * torch.maximum(plain_N, clipped_N)
    return TokenLoss(loss_N, {"critic/vf_clipfrac": (clipped_N > plain_N).float()})
