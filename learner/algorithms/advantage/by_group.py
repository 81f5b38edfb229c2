"""Advantages that compare the rows of a group: all tokens of a row get one number (pure)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from learner.algorithms.advantage import groups
from learner.algorithms.advantage.terms import Advantage, AdvantageFn, AdvantageInput
from learner.algorithms.rows import first_rows, masked, sum_episodes, whiten


def per_group(estimate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> AdvantageFn:
    """Return the estimator whose rows get `estimate(scores_R, group_R)`."""

    def run(x: AdvantageInput) -> Advantage:
        return _broadcast(x, _of_episodes(x, lambda e: estimate(x.scores_R[e], x.group_R[e])))

    run.__doc__ = estimate.__doc__
    return run


grpo = per_group(groups.grpo)
dr_grpo = per_group(groups.dr_grpo)
grpo_passk = per_group(groups.grpo_passk)
rloo_vectorized = per_group(groups.rloo)


def rloo(x: AdvantageInput) -> Advantage:
    """Leave-one-out; arXiv 2402.14740. A group of one gets 0; its raw score under `verl_compat`."""
    estimate = partial(groups.rloo, keep_single=x.verl_compat)
    return _broadcast(x, _of_episodes(x, lambda e: estimate(x.scores_R[e], x.group_R[e])))


def opo(x: AdvantageInput) -> Advantage:
    """Score less the length-weighted mean of the group; arXiv 2505.23585."""
    length_R = sum_episodes(x.rows.count(x.mask_N), x.episode_R)
    return _broadcast(x, _of_episodes(x, lambda e: groups.opo(x.scores_R[e], x.group_R[e], length_R[e])))


def gpg(x: AdvantageInput) -> Advantage:
    """Score less group mean, scaled up by the share of rows that scored; arXiv 2504.02546."""
    scores_E = x.scores_R[_first_rows(x)]
    counts = torch.stack([torch.tensor(float(len(scores_E))), (scores_E != 0).float().sum()])
    num_rows, num_scored = x.over_ranks(counts).tolist()
    estimate = partial(groups.gpg, num_rows=num_rows, num_scored=num_scored)
    return _broadcast(x, _of_episodes(x, lambda e: estimate(x.scores_R[e], x.group_R[e])))


def gdpo(x: AdvantageInput) -> Advantage:
    """Each component of the reward by its own group statistics, then whitened; arXiv 2601.05242."""
    components_RK = x.scores_R[:, None] if x.components_RK is None else x.components_RK
    estimate = partial(groups.gdpo, weights=x.component_weights)
    return _whitened(x, _of_episodes(x, lambda e: estimate(components_RK[e], x.group_R[e])))


def reinforce_plus_plus_baseline(x: AdvantageInput) -> Advantage:
    """Score less group mean, whitened over the batch; arXiv 2501.03262."""
    return _whitened(x, _of_episodes(x, lambda e: groups.dr_grpo(x.scores_R[e], x.group_R[e])))


def _of_episodes(x: AdvantageInput, estimate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return `estimate` of one row of each episode, for all rows of it."""
    first_E = _first_rows(x)
    if len(first_E) == x.rows.num_rows:
        return estimate(first_E)
    assert x.episode_R is not None, "only episodes have several rows"
    return estimate(first_E)[x.episode_R]


def _first_rows(x: AdvantageInput) -> torch.Tensor:
    """Return a row of each episode."""
    return torch.arange(x.rows.num_rows) if x.episode_R is None else first_rows(x.episode_R)


def _broadcast(x: AdvantageInput, advantages_R: torch.Tensor) -> Advantage:
    advantages_N = masked(x.rows.spread(advantages_R), x.mask_N)
    return Advantage(advantages_N, advantages_N)


def _whitened(x: AdvantageInput, advantages_R: torch.Tensor) -> Advantage:
    spread_N = masked(x.rows.spread(advantages_R), x.mask_N)
    whitened_N = masked(whiten(spread_N, x.mask_N, over_ranks=x.over_ranks), x.mask_N)
    return Advantage(whitened_N, whitened_N)
