"""Policy losses that clip the ratio, and the plain gradient (pure).

Shapes: N packed positions, R rows.
"""

from __future__ import annotations

import torch

from learner.algorithms.losses.terms import LossInput, TokenLoss
from learner.algorithms.rows import EPSILON, clamp_log_ratio, masked, running_sum


def vanilla(x: LossInput) -> TokenLoss:
    """PPO's clipped loss with asymmetric and dual clip; arXiv 1707.06347, 1912.09729, 2503.14476."""
    log_ratio_N = x.logprobs_N - x.old_N
    ratio_N = clamp_log_ratio(log_ratio_N).exp()
    cost_N = -x.advantages_N
    plain_N = cost_N * ratio_N
    bounded_N = cost_N * ratio_N.clamp(1 - x.clip.low, 1 + x.clip.high)
    clipped_N = torch.maximum(plain_N, bounded_N)
    ceiling_N = torch.where(x.advantages_N < 0, cost_N * x.clip.dual, torch.inf)
    loss_N = torch.minimum(clipped_N, ceiling_N)
    metrics = {
        "actor/pg_clipfrac": (bounded_N > plain_N).float(),
        "actor/pg_clipfrac_lower": (clipped_N > ceiling_N).float(),
        "actor/ppo_kl": -log_ratio_N.detach(),
    }
    return TokenLoss(loss_N, metrics)


def gspo(x: LossInput) -> TokenLoss:
    """One ratio per sequence, gradient per token; arXiv 2507.18071. Aggregate by seq-mean-token-mean."""
    log_ratio_N = x.logprobs_N - x.old_N
    mean_R = x.rows.sum(log_ratio_N, x.mask_N) / x.rows.count(x.mask_N).clamp(min=1)
    log_sequence_N = x.logprobs_N - x.logprobs_N.detach() + x.rows.spread(mean_R.detach())
    ratio_N = log_sequence_N.clamp(max=10.0).exp()
    plain_N = -x.advantages_N * ratio_N
    bounded_N = -x.advantages_N * ratio_N.clamp(1 - x.clip.low, 1 + x.clip.high)
    metrics = {
        "actor/pg_clipfrac": (bounded_N > plain_N).float(),
        "actor/pg_clipfrac_lower": torch.zeros_like(log_ratio_N),
        "actor/ppo_kl": -log_ratio_N.detach(),
    }
    return TokenLoss(torch.maximum(plain_N, bounded_N), metrics)


def cispo(x: LossInput) -> TokenLoss:
    """Clip the weight, never the gradient; arXiv 2506.13585."""
    log_ratio_N = x.logprobs_N - x.old_N
    ratio_N = clamp_log_ratio(log_ratio_N).exp().detach()
    clipped_N = ratio_N.clamp(1 - x.clip.low, 1 + x.clip.high)
    metrics = {
        "actor/pg_clipfrac": (clipped_N != ratio_N).float(),
        "actor/pg_clipfrac_lower": torch.zeros_like(log_ratio_N),
        "actor/ppo_kl": -log_ratio_N.detach(),
    }
    return TokenLoss(-clipped_N * x.advantages_N * x.logprobs_N, metrics)


def reinforce(x: LossInput) -> TokenLoss:
    """The plain policy gradient, for importance weights that multiply it; arXiv 2504.02546 as `gpg`."""
    metrics = {"actor/ppo_kl": -(x.logprobs_N - x.old_N).detach()}
    return TokenLoss(-x.advantages_N * x.logprobs_N, metrics)


def geo_mean(x: LossInput) -> TokenLoss:
    """One ratio per row, the geometric mean of ratios clipped in log space; arXiv 2507.20673 (GMPO).

    The importance weight of a row is the geometric mean of its tokens'. Rows are averaged whatever
    the aggregation.
    """
    log_ratio_N = x.logprobs_N - x.old_N
    bounded_N = log_ratio_N.clamp(-x.clip.low, x.clip.high)
    sign_N = x.advantages_N.sign()
    pessimistic_N = sign_N * torch.minimum(sign_N * log_ratio_N, sign_N * bounded_N)
    ratio_R = x.rows.mean(pessimistic_N, x.mask_N).exp()
    loss_R = -x.rows.mean(x.advantages_N, x.mask_N) * ratio_R
    if x.weights_N is not None:
        loss_R = loss_R * x.rows.mean((x.weights_N + 1e-10).log(), x.mask_N).exp()
    is_clipped_N = bounded_N != log_ratio_N
    metrics = {
        "actor/pg_clipfrac": (is_clipped_N & (x.advantages_N > 0)).float(),
        "actor/pg_clipfrac_lower": (is_clipped_N & (x.advantages_N < 0)).float(),
        "actor/ppo_kl": -log_ratio_N.detach(),
    }
    length_R = x.rows.count(x.mask_N)
    return TokenLoss(x.rows.spread(loss_R / (length_R + EPSILON)), metrics, loss_R=loss_R)


def m2po(x: LossInput) -> TokenLoss:
    """Leave out the tokens furthest from the sampler until the second moment fits; arXiv 2510.01161.

    The largest squared log-ratios of old to behaviour go first, until the mean of the rest is below
    the budget; one token always stays. The rest has the plain ratio, without clip.
    """
    behaviour_N = x.old_N if x.behaviour_N is None else x.behaviour_N
    keep_N = keep_second_moment(x.old_N - behaviour_N, x.mask_N, x.constants.m2po_budget)
    log_ratio_N = x.logprobs_N - x.old_N
    loss_N = -x.advantages_N * clamp_log_ratio(log_ratio_N).exp() * keep_N
    return TokenLoss(loss_N, {"actor/pg_clipfrac": 1 - keep_N, "actor/ppo_kl": -log_ratio_N.detach()})


def keep_second_moment(log_ratio_N: torch.Tensor, mask_N: torch.Tensor, budget: float) -> torch.Tensor:
    """Return 1 on the tokens whose mean squared log-ratio stays below `budget`, largest left out [N]."""
    square_N = masked(log_ratio_N.detach().square(), mask_N)
    index = (mask_N != 0).nonzero()[:, 0]
    order = index[square_N[index].argsort(stable=True)]
    mean = running_sum(square_N[order]) / torch.arange(1, len(order) + 1, device=order.device)
    is_kept = mean < budget
    is_kept[:1] = True
    kept_N = torch.zeros_like(mask_N)
    kept_N[order[is_kept]] = 1.0
    return kept_N
