"""Estimators of the KL divergence per token (pure).

Shapes: any; log-probs of the current and of a reference policy.
"""

from __future__ import annotations

import torch

from learner.algorithms.rows import clamp_log_ratio

KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


def kl_penalty(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the estimate of KL(current, reference) at each token.

    A `+` behind the kind takes its value and the gradient of k2, which is unbiased.
    """
    base = kind.removesuffix("+")
    assert base in KINDS, kind
    difference = logprobs - reference
    if kind.endswith("+"):
        square = 0.5 * difference.square()
        return square - square.detach() + kl_penalty(logprobs, reference, base).detach()
    if base in ("k1", "kl"):
        return difference
    if base == "abs":
        return difference.abs()
    if base in ("k2", "mse"):
        return 0.5 * difference.square()
    bounded = clamp_log_ratio(-difference)
    return (bounded.exp() - bounded - 1).clamp(-10.0, 10.0)
