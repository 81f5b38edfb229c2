"""Baselines per token that minimise the variance of the policy gradient (pure).

The weight of a token is the expected squared norm of its score function, 1 - 2 pi + sum pi^2, summed
along the row. The baseline of a place in the answer is the mean return of the group there, under
these weights.

Shapes: N packed positions, R rows.
"""

from __future__ import annotations

import torch

from learner.algorithms.advantage.groups import number_groups, size_of_group
from learner.algorithms.advantage.returns import reward_to_go
from learner.algorithms.advantage.terms import Advantage, AdvantageInput
from learner.algorithms.rows import EPSILON, Rows, masked


def optimal_token_baseline(x: AdvantageInput) -> Advantage:
    """Return to go less the optimal baseline of the token's column.

    Where one row of the group is longer than all others, nothing compares with its tail: its baseline
    is 0 there. A group of one has baseline 0.
    """
    return _subtract_baseline(x, x.rows.column_N - _first_column(x))


def tir_optimal_token_baseline(x: AdvantageInput) -> Advantage:
    """As `optimal_token_baseline`, aligned by the number of generated tokens: for several turns."""
    total_R = x.rows.count(x.mask_N).long()
    return _subtract_baseline(x, x.rows.spread(total_R) - x.rows.remaining(x.mask_N))


def token_weights(
    logprobs_N: torch.Tensor, sum_pi_squared_N: torch.Tensor, weights_N: torch.Tensor | None
) -> torch.Tensor:
    """Return 1 - 2 pi + sum pi^2 of each token, times the squared importance weight [N]."""
    norm_N = 1 - 2 * logprobs_N.exp() + sum_pi_squared_N
    return norm_N if weights_N is None else norm_N * weights_N.square()


def cumulate(x_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the running masked sum within each row [N]."""
    kept_N = masked(x_N, mask_N).double()
    running_N = kept_N.cumsum(0)
    total_R = torch.zeros(rows.num_rows, dtype=torch.float64).index_add(0, rows.row_N, kept_N)
    before_R = total_R.cumsum(0) - total_R
    return (running_N - before_R[rows.row_N]).to(x_N.dtype)


def _first_column(x: AdvantageInput) -> torch.Tensor:
    """Return the first column of each position's group that holds a token: where the answers start."""
    if x.verl_compat:
        return torch.zeros_like(x.rows.row_N)
    group_R, num_groups = number_groups(x.group_R)
    column_N, is_in_N = x.rows.column_N, x.mask_N != 0
    last = len(column_N)
    first_G = torch.full((num_groups,), last, dtype=torch.long)
    first_G = first_G.scatter_reduce(0, group_R[x.rows.row_N], torch.where(is_in_N, column_N, last), "amin")
    return first_G[group_R][x.rows.row_N]


def _subtract_baseline(x: AdvantageInput, place_N: torch.Tensor) -> Advantage:
    assert x.prox_N is not None and x.sum_pi_squared_N is not None, "needs prox and sum pi^2"
    returns_N = reward_to_go(x)
    weights_N = token_weights(x.prox_N, x.sum_pi_squared_N, x.weights_N)
    weights_N = cumulate(weights_N, x.mask_N, x.rows)
    group_R, num_groups = number_groups(x.group_R)
    num_places = max(int(place_N.max()), 0) + 1 if len(place_N) else 1
    key_N = group_R[x.rows.row_N] * num_places + place_N.clamp(min=0)
    empty = torch.zeros(num_groups * num_places)
    above = empty.index_add(0, key_N, masked(returns_N * weights_N, x.mask_N))
    below = empty.index_add(0, key_N, masked(weights_N, x.mask_N))
    baseline_N = (above / (below + EPSILON))[key_N]
    is_without_N = _is_lone_tail(x, group_R, num_groups, place_N) | x.rows.spread(
        size_of_group(x.group_R) == 1
    )
    baseline_N = torch.where(is_without_N, 0.0, baseline_N)
    return Advantage((returns_N - baseline_N) * x.mask_N, returns_N)


def _is_lone_tail(
    x: AdvantageInput, group_R: torch.Tensor, num_groups: int, place_N: torch.Tensor
) -> torch.Tensor:
    """Tell where the longest row of a group goes on alone [N]. verl takes tokens for places."""
    extent_R = x.rows.max(place_N + 1.0, x.mask_N).clamp(min=0)
    length_R = x.rows.count(x.mask_N) if x.verl_compat else extent_R
    zeros_G = torch.zeros(num_groups)
    longest_R = zeros_G.scatter_reduce(0, group_R, length_R, "amax")[group_R]
    is_longest_R = length_R == longest_R
    num_longest_R = zeros_G.index_add(0, group_R, is_longest_R.float())[group_R]
    others_R = torch.where(is_longest_R, 0.0, length_R)
    second_R = zeros_G.scatter_reduce(0, group_R, others_R, "amax")[group_R]
    is_lone_R = is_longest_R & (num_longest_R == 1)
    return x.rows.spread(is_lone_R) & (place_N >= x.rows.spread(second_R))
