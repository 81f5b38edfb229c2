"""The proximal log-probs: the centre of the clip (pure).

`recompute` takes a forward pass at the start of the step; `behaviour` takes the sampler's own;
`loglinear` interpolates between the sampler's and the current policy's by age, without a pass.

Shapes: N packed positions.
"""

from __future__ import annotations

import torch

MODES = ("recompute", "loglinear", "behaviour")


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
