"""Input and output of an advantage estimator (pure).

Shapes: N packed positions, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from learner.algorithms.rows import Rows, Sum


def on_one_rank(totals: torch.Tensor) -> torch.Tensor:
    """Return totals as they are: one rank holds the whole batch."""
    return totals


@dataclass(frozen=True)
class AdvantageInput:
    """One batch of whole groups.

    Attributes:
        rewards_N: Reward of each token; with an outcome reward, that of the row at its last token.
        scores_R: Sum of each row's rewards, those of a row without tokens too.
        mask_N: Sampled tokens; what lies between (tool output) is transparent.
        rows: The rows.
        group_R: Group of each row, any labels.
        episode_R: Episode of each row, from 0; rows of one share its score. None: each row is one.
        gamma, lam: Discount, and the trace decay of GAE and V-trace.
        values_N: Value of the state before each token; for gae and vtrace.
        prox_N, behaviour_N: Log-probs at the start of the step and of the sampler; for vtrace and the
            optimal baselines.
        weights_N: Importance weights, for the optimal baselines.
        sum_pi_squared_N: Sum over the vocabulary of squared probabilities, for the optimal baselines.
        greedy_R: Score of a greedy answer to the row's prompt, for remax.
        components_RK, component_weights: Parts of the reward, for gdpo.
        rho_max, c_max: Truncation of V-trace's weights.
        verl_compat: Give verl's number where ours differs on purpose.
        over_ranks: Sums totals over data-parallel ranks, for whitening.
    """

    rewards_N: torch.Tensor
    scores_R: torch.Tensor
    mask_N: torch.Tensor
    rows: Rows
    group_R: torch.Tensor
    episode_R: torch.Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    values_N: torch.Tensor | None = None
    prox_N: torch.Tensor | None = None
    behaviour_N: torch.Tensor | None = None
    weights_N: torch.Tensor | None = None
    sum_pi_squared_N: torch.Tensor | None = None
    greedy_R: torch.Tensor | None = None
    components_RK: torch.Tensor | None = None
    component_weights: tuple[float, ...] = ()
    rho_max: float = 1.0
    c_max: float = 1.0
    verl_compat: bool = False
    over_ranks: Sum = field(default=on_one_rank)


@dataclass(frozen=True)
class Advantage:
    """Advantages, and the returns that a critic learns. Outside the mask both are unspecified."""

    advantages_N: torch.Tensor
    returns_N: torch.Tensor


AdvantageFn = Callable[[AdvantageInput], Advantage]
