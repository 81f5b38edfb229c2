"""Advantages that compare the rows of a group: all tokens of a row get one number (pure)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from learner.algorithms.advantage import groups
from learner.algorithms.advantage.terms import Advantage, AdvantageFn, AdvantageInput
from learner.algorithms.rows import masked, whiten


def per_group(estimate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> AdvantageFn:
    """Return the estimator whose rows get `estimate(scores_R, group_R)`."""

    def run(x: AdvantageInput) -> Advantage:
        return _broadcast(x, estimate(x.scores_R, x.group_R))

    run.__doc__ = estimate.__doc__
    return run


grpo = per_group(groups.grpo)
dr_grpo = per_group(groups.dr_grpo)
grpo_passk = per_group(groups.grpo_passk)
rloo_vectorized = per_group(groups.rloo)


def rloo(x: AdvantageInput) -> Advantage:
    """Leave-one-out; arXiv 2402.14740. A group of one gets 0; its raw score under `verl_compat`."""
    return _broadcast(x, groups.rloo(x.scores_R, x.group_R, keep_single=x.verl_compat))


def opo(x: AdvantageInput) -> Advantage:
    """Score less the length-weighted mean of the group; arXiv 2505.23585."""
    return _broadcast(x, groups.opo(x.scores_R, x.group_R, x.rows.count(x.mask_N)))


def gpg(x: AdvantageInput) -> Advantage:
    """Score less group mean, scaled up by the share of rows that scored; arXiv 2504.02546."""
    counts = torch.stack([torch.tensor(float(x.rows.num_rows)), (x.scores_R != 0).float().sum()])
    num_rows, num_scored = x.over_ranks(counts).tolist()
    return _broadcast(x, groups.gpg(x.scores_R, x.group_R, num_rows, num_scored))


def gdpo(x: AdvantageInput) -> Advantage:
    """Each component of the reward by its own group statistics, then whitened; arXiv 2601.05242."""
    components_RK = x.scores_R[:, None] if x.components_RK is None else x.components_RK
    advantages_R = groups.gdpo(components_RK, x.group_R, x.component_weights)
    return _whitened(x, advantages_R)


def reinforce_plus_plus_baseline(x: AdvantageInput) -> Advantage:
    """Score less group mean, whitened over the batch; arXiv 2501.03262."""
    return _whitened(x, groups.dr_grpo(x.scores_R, x.group_R))


def _broadcast(x: AdvantageInput, advantages_R: torch.Tensor) -> Advantage:
    advantages_N = masked(x.rows.spread(advantages_R), x.mask_N)
    return Advantage(advantages_N, advantages_N)


def _whitened(x: AdvantageInput, advantages_R: torch.Tensor) -> Advantage:
    spread_N = masked(x.rows.spread(advantages_R), x.mask_N)
    whitened_N = masked(whiten(spread_N, x.mask_N, over_ranks=x.over_ranks), x.mask_N)
    return Advantage(whitened_N, whitened_N)
