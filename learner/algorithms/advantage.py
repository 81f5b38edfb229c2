"""Advantages from the rewards of a group (pure).

An estimator takes rewards_R and group_R (any labels) and returns advantages_R: one number per row,
which all its tokens share. All of them are exactly 0 on a group whose rewards are all equal.

Shapes: R rows, G groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

AdvantageFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EPSILON = 1e-6


def grpo(rewards_R: torch.Tensor, group_R: torch.Tensor, *, norm_by_std: bool = True) -> torch.Tensor:
    """Return (reward - group mean) / (group std + 1e-6); arXiv 2402.03300.

    The std is the unbiased one. A group of one has mean 0 and std 1. `norm_by_std=False` is Dr.GRPO.
    """
    group_R, num_groups = _number_groups(group_R)
    size_G = _sum_groups(torch.ones_like(rewards_R), group_R, num_groups)
    is_single_R = (size_G == 1)[group_R]
    mean_R = (_sum_groups(rewards_R, group_R, num_groups) / size_G)[group_R]
    centred_R = torch.where(is_single_R, rewards_R, rewards_R - mean_R)
    centred_R = torch.where(is_constant(rewards_R, group_R) & ~is_single_R, 0.0, centred_R)
    if not norm_by_std:
        return centred_R
    variance_G = _sum_groups(centred_R.square(), group_R, num_groups) / (size_G - 1).clamp(min=1)
    std_R = torch.where(is_single_R, 1.0, variance_G.sqrt()[group_R])
    return centred_R / (std_R + EPSILON)


def dr_grpo(rewards_R: torch.Tensor, group_R: torch.Tensor) -> torch.Tensor:
    """Return reward - group mean; arXiv 2503.20783. Pair it with seq-mean-token-sum-norm."""
    return grpo(rewards_R, group_R, norm_by_std=False)


def rloo(rewards_R: torch.Tensor, group_R: torch.Tensor) -> torch.Tensor:
    """Return reward - mean of the others of the group; arXiv 2402.14740. A group of one gets 0."""
    group_R, num_groups = _number_groups(group_R)
    size_R = _sum_groups(torch.ones_like(rewards_R), group_R, num_groups)[group_R]
    centred_R = torch.where(size_R == 1, 0.0, grpo(rewards_R, group_R, norm_by_std=False))
    return centred_R * size_R / (size_R - 1).clamp(min=1)


def is_constant(rewards_R: torch.Tensor, group_R: torch.Tensor) -> torch.Tensor:
    """Tell for every row whether all rewards of its group are equal: nothing is learned from it."""
    group_R, num_groups = _number_groups(group_R)
    highest_G = torch.full((num_groups,), -torch.inf).scatter_reduce(0, group_R, rewards_R, "amax")
    lowest_G = torch.full((num_groups,), torch.inf).scatter_reduce(0, group_R, rewards_R, "amin")
    return (highest_G == lowest_G)[group_R]


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _number_groups(group_R: torch.Tensor) -> tuple[torch.Tensor, int]:
    labels, numbers_R = torch.unique(group_R, return_inverse=True)
    return numbers_R, len(labels)


def _sum_groups(x_R: torch.Tensor, group_R: torch.Tensor, num_groups: int) -> torch.Tensor:
    return torch.zeros(num_groups).index_add_(0, group_R, x_R)
