"""Advantages from discounted sums along a row (pure).

All run from the right. A token outside the mask is transparent: what is carried passes through it and
no discount is spent. The value after the last token is 0.

Shapes: N packed positions, R rows, K the most tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from learner.algorithms.advantage.terms import Advantage, AdvantageInput
from learner.algorithms.rows import clamp_log_ratio, masked, whiten

Carry = tuple[torch.Tensor, ...]
Scan = Callable[[Carry, Carry], tuple[Carry, Carry]]


def gae(x: AdvantageInput) -> Advantage:
    """Generalised advantage estimation, whitened; arXiv 1506.02438. Returns are those before whitening."""
    raw_N, returns_N = raw_gae(x)
    return Advantage(whiten(raw_N, x.mask_N, over_ranks=x.over_ranks), returns_N)


def raw_gae(x: AdvantageInput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages before whitening [N], advantages + values [N])."""
    assert x.values_N is not None, "gae needs the values of a critic"

    def step(carry: Carry, now: Carry) -> tuple[Carry, Carry]:
        (next_value_R, advantage_R), (reward_R, value_R) = carry, now
        delta_R = reward_R + x.gamma * next_value_R - value_R
        advantage_R = delta_R + x.gamma * x.lam * advantage_R
        return (value_R, advantage_R), (advantage_R,)

    (advantages_N,) = _scan(x, (x.rewards_N, x.values_N), (2, 1), step)
    return advantages_N, advantages_N + x.values_N


def reinforce_plus_plus(x: AdvantageInput) -> Advantage:
    """Whitened discounted return, no group needed; arXiv 2501.03262."""
    returns_N = masked(_discounted(x, x.gamma), x.mask_N)
    whitened_N = whiten(returns_N, x.mask_N, over_ranks=x.over_ranks)
    return Advantage(masked(whitened_N, x.mask_N), returns_N)


def remax(x: AdvantageInput) -> Advantage:
    """Return to go less the score of a greedy answer to the same prompt; arXiv 2310.10505."""
    assert x.greedy_R is not None, "remax needs the score of a greedy answer per row"
    returns_N = reward_to_go(x)
    return Advantage(returns_N - x.rows.spread(x.greedy_R) * x.mask_N, returns_N)


def reward_to_go(x: AdvantageInput) -> torch.Tensor:
    """Return the undiscounted sum of rewards from each token on [N]."""
    return _discounted(x, 1.0)


def vtrace(x: AdvantageInput) -> Advantage:
    """V-trace with truncated weights of prox over behaviour; arXiv 1802.01561. Not whitened.

    On policy, and with both truncations at 1 or more, the returns are GAE's, and with lambda 1 so are
    the advantages before whitening. With rho_max to 0 both vanish: advantages 0, returns the values.
    """
    assert x.values_N is not None, "vtrace needs the values of a critic"
    assert x.prox_N is not None and x.behaviour_N is not None, "vtrace needs prox and behaviour log-probs"
    ratio_N = clamp_log_ratio(x.prox_N - x.behaviour_N).exp()
    rho_N, c_N = ratio_N.clamp(max=x.rho_max), x.lam * ratio_N.clamp(max=x.c_max)

    def step(carry: Carry, now: Carry) -> tuple[Carry, Carry]:
        (next_value_R, next_target_R), (reward_R, value_R, rho_R, c_R) = carry, now
        delta_R = rho_R * (reward_R + x.gamma * next_value_R - value_R)
        target_R = value_R + delta_R + x.gamma * c_R * (next_target_R - next_value_R)
        advantage_R = rho_R * (reward_R + x.gamma * next_target_R - value_R)
        return (value_R, target_R), (advantage_R, target_R)

    advantages_N, targets_N = _scan(x, (x.rewards_N, x.values_N, rho_N, c_N), (2, 2), step)
    return Advantage(advantages_N, targets_N)


def _discounted(x: AdvantageInput, gamma: float) -> torch.Tensor:
    def step(carry: Carry, now: Carry) -> tuple[Carry, Carry]:
        return_R = now[0] + gamma * carry[0]
        return (return_R,), (return_R,)

    return _scan(x, (x.rewards_N,), (1, 1), step)[0]


def _scan(x: AdvantageInput, columns: Carry, sizes: tuple[int, int], step: Scan) -> Carry:
    """Run `step` over the masked-in tokens of all rows at once, from the right.

    Token k from the right of every row stands in column k of a grid, so that tokens outside the mask
    cost nothing; a position outside the mask reads what is carried past it, which is its own k.
    `sizes` are the number of carried tensors and of those put out.
    """
    k_N = x.rows.remaining(x.mask_N)
    is_in_N = x.mask_N != 0
    where = (k_N[is_in_N], x.rows.row_N[is_in_N])
    num_steps = int(k_N.max()) if len(k_N) else 0
    grids = []
    for column_N in columns:
        grid_KR = column_N.new_zeros(num_steps + 1, x.rows.num_rows)
        grid_KR[where] = column_N.detach()[is_in_N]
        grids.append(grid_KR)
    carry: Carry = tuple(columns[0].new_zeros(x.rows.num_rows) for _ in range(sizes[0]))
    found: list[Carry] = []
    for k in range(1, num_steps + 1):
        carry, out = step(carry, tuple(grid_KR[k] for grid_KR in grids))
        found.append(out)
    nothing = columns[0].new_zeros(x.rows.num_rows)
    stacked = [torch.stack([nothing, *(out[i] for out in found)]) for i in range(sizes[1])]
    return tuple(grid_KR[k_N, x.rows.row_N] for grid_KR in stacked)
