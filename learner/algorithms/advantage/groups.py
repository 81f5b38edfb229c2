"""Advantages that compare the rows of a group (pure).

Each function takes scores_R and group_R (any labels) and returns one number per row, which all its
tokens share. All are exactly 0 on a group whose scores are all equal.

Shapes: R rows, G groups, K components of the reward.
"""

from __future__ import annotations

import torch

EPSILON = 1e-6


def grpo(scores_R: torch.Tensor, group_R: torch.Tensor, *, norm_by_std: bool = True) -> torch.Tensor:
    """Return (score - group mean) / (group std + 1e-6); arXiv 2402.03300.

    The std is the unbiased one. A group of one has mean 0 and std 1. `norm_by_std=False` is Dr.GRPO.
    """
    group_R, num_groups = number_groups(group_R)
    size_G = sum_groups(torch.ones_like(scores_R), group_R, num_groups)
    is_single_R = (size_G == 1)[group_R]
    mean_R = (sum_groups(scores_R, group_R, num_groups) / size_G)[group_R]
    centred_R = torch.where(is_single_R, scores_R, scores_R - mean_R)
    centred_R = torch.where(is_constant(scores_R, group_R) & ~is_single_R, 0.0, centred_R)
    if not norm_by_std:
        return centred_R
    variance_G = sum_groups(centred_R.square(), group_R, num_groups) / (size_G - 1).clamp(min=1)
    std_R = torch.where(is_single_R, 1.0, variance_G.sqrt()[group_R])
    return centred_R / (std_R + EPSILON)


def dr_grpo(scores_R: torch.Tensor, group_R: torch.Tensor) -> torch.Tensor:
    """Return score - group mean; arXiv 2503.20783. Pair it with seq-mean-token-sum-norm."""
    return grpo(scores_R, group_R, norm_by_std=False)


def rloo(scores_R: torch.Tensor, group_R: torch.Tensor, *, keep_single: bool = False) -> torch.Tensor:
    """Return score - mean of the others of the group; arXiv 2402.14740.

    A group of one gets 0, or with `keep_single` its score as it stands (verl's `rloo`; verl's
    `rloo_vectorized` gives 0).
    """
    size_R = size_of_group(group_R)
    centred_R = grpo(scores_R, group_R, norm_by_std=False)
    single_R = scores_R if keep_single else torch.zeros_like(scores_R)
    return torch.where(size_R == 1, single_R, centred_R * size_R / (size_R - 1).clamp(min=1))


def grpo_passk(scores_R: torch.Tensor, group_R: torch.Tensor, *, norm_by_std: bool = True) -> torch.Tensor:
    """Return best - second best for the best of each group, 0 for all others; arXiv 2503.19595.

    A tie at the top gives 0, and so does a group of one (an error in verl).
    """
    group_R, num_groups = number_groups(group_R)
    size_G = sum_groups(torch.ones_like(scores_R), group_R, num_groups)
    lowest_G = torch.full((num_groups,), -torch.inf)
    best_R = lowest_G.scatter_reduce(0, group_R, scores_R, "amax")[group_R]
    is_best_R = scores_R == best_R
    is_tie_R = (sum_groups(is_best_R.float(), group_R, num_groups) > 1)[group_R]
    others_R = torch.where(is_best_R, -torch.inf, scores_R)
    second_R = lowest_G.scatter_reduce(0, group_R, others_R, "amax")[group_R]
    is_winner_R = is_best_R & ~is_tie_R & (size_G > 1)[group_R]
    lead_R = torch.where(is_winner_R, scores_R - torch.where(is_winner_R, second_R, 0.0), 0.0)
    if not norm_by_std:
        return lead_R
    mean_R = (sum_groups(scores_R, group_R, num_groups) / size_G)[group_R]
    variance_G = sum_groups((scores_R - mean_R).square(), group_R, num_groups) / (size_G - 1).clamp(min=1)
    return lead_R / (variance_G.sqrt()[group_R] + EPSILON)


def opo(scores_R: torch.Tensor, group_R: torch.Tensor, length_R: torch.Tensor) -> torch.Tensor:
    """Return score - length-weighted mean score of the group; arXiv 2505.23585.

    A group of one has baseline 0, and so has one without a token.
    """
    size_R = size_of_group(group_R)
    numbers_R, num_groups = number_groups(group_R)
    weighted_G = sum_groups(length_R * scores_R, numbers_R, num_groups)
    baseline_R = (weighted_G / sum_groups(length_R, numbers_R, num_groups).clamp(min=1))[numbers_R]
    is_flat_R = is_constant(scores_R, group_R) & (size_R > 1) & (baseline_R != 0)
    baseline_R = torch.where(size_R == 1, 0.0, baseline_R)
    return torch.where(is_flat_R, 0.0, scores_R - baseline_R)


def gpg(scores_R: torch.Tensor, group_R: torch.Tensor, num_rows: float, num_scored: float) -> torch.Tensor:
    """Return (score - group mean) * rows / rows with a score other than 0; arXiv 2504.02546."""
    return grpo(scores_R, group_R, norm_by_std=False) * (num_rows / max(1.0, num_scored))


def gdpo(components_RK: torch.Tensor, group_R: torch.Tensor, weights: tuple[float, ...] = ()) -> torch.Tensor:
    """Return the weighted sum of each component's grpo advantage, to be whitened; arXiv 2601.05242."""
    weights = weights or (1.0,) * components_RK.shape[1]
    assert len(weights) == components_RK.shape[1], "one weight per component"
    parts = [w * grpo(scores_R, group_R) for w, scores_R in zip(weights, components_RK.T, strict=True)]
    return torch.stack(parts).sum(0)


def is_constant(scores_R: torch.Tensor, group_R: torch.Tensor) -> torch.Tensor:
    """Tell for every row whether all scores of its group are equal: nothing is learned from it."""
    group_R, num_groups = number_groups(group_R)
    highest_G = torch.full((num_groups,), -torch.inf).scatter_reduce(0, group_R, scores_R, "amax")
    lowest_G = torch.full((num_groups,), torch.inf).scatter_reduce(0, group_R, scores_R, "amin")
    return (highest_G == lowest_G)[group_R]


def number_groups(group_R: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return labels 0..G-1 in place of any, and G."""
    labels, numbers_R = torch.unique(group_R, return_inverse=True)
    return numbers_R, len(labels)


def sum_groups(x_R: torch.Tensor, group_R: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return the sum of each group [G]; `group_R` is numbered."""
    return torch.zeros(num_groups).index_add_(0, group_R, x_R)


def size_of_group(group_R: torch.Tensor) -> torch.Tensor:
    """Return for each row how many rows its group has [R]."""
    group_R, num_groups = number_groups(group_R)
    return sum_groups(torch.ones(len(group_R)), group_R, num_groups)[group_R]
