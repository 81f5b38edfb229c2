"""An advantage that teaches nothing, for the test that learning needs advantages."""

from __future__ import annotations

import torch

from learner.algorithms.advantage import Advantage, AdvantageInput


def zero(x: AdvantageInput) -> Advantage:
    """Return 0 for every token."""
    zeros_N = torch.zeros_like(x.rewards_N)
    return Advantage(zeros_N, zeros_N)
