"""Policy losses that hold back the tokens whose log-prob and advantage move together (pure).

These tokens drive the entropy down; arXiv 2505.22617. Which they are depends on all tokens at hand:
another cut into microbatches picks others.

Shapes: N packed positions.
"""

from __future__ import annotations

import torch

from learner.algorithms.losses.terms import LossInput, TokenLoss
from learner.algorithms.rows import masked_mean


def clip_cov(x: LossInput) -> TokenLoss:
    """PPO's clip, and no gradient on a few tokens drawn among those of high covariance."""
    log_ratio_N = x.logprobs_N - x.old_N
    ratio_N = log_ratio_N.exp()
    plain_N = -x.advantages_N * ratio_N
    bounded_N = -x.advantages_N * ratio_N.clamp(1 - x.clip.low, 1 + x.clip.high)
    is_candidate_N = find_candidates(x) & ~(bounded_N > plain_N)
    index = is_candidate_N.nonzero()[:, 0]
    num_wanted = max(1, int(x.constants.cov_ratio * float(x.mask_N.sum())))
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(x.seed)).to(index.device)
    kept_N = torch.ones_like(x.mask_N)
    kept_N[index[order[:num_wanted]]] = 0.0
    metrics = {"actor/pg_clipfrac": 1 - kept_N, "actor/ppo_kl": -log_ratio_N.detach()}
    return TokenLoss(torch.maximum(plain_N, bounded_N) * kept_N, metrics)


def kl_cov(x: LossInput) -> TokenLoss:
    """The plain ratio, and a penalty on |log-ratio| of the tokens with the highest covariance."""
    log_ratio_N = x.logprobs_N - x.old_N
    index = (x.mask_N != 0).nonzero()[:, 0]
    penalised_N = torch.zeros_like(x.mask_N)
    if len(index):
        num_wanted = max(1, int(len(index) * x.constants.cov_ratio))
        covariance = _covariance(x)[index]
        penalised_N[index[covariance.topk(num_wanted).indices]] = x.constants.cov_kl_coef
    loss_N = -x.advantages_N * log_ratio_N.exp() + penalised_N * log_ratio_N.abs()
    return TokenLoss(loss_N, {"actor/ppo_kl": log_ratio_N.detach().abs()})


def find_candidates(x: LossInput) -> torch.Tensor:
    """Tell which trained tokens have a covariance between clip_cov's bounds [N]."""
    covariance_N = _covariance(x)
    is_between_N = (covariance_N > x.constants.cov_low) & (covariance_N < x.constants.cov_high)
    return is_between_N & (x.mask_N != 0)


def _covariance(x: LossInput) -> torch.Tensor:
    logprobs_N = x.logprobs_N.detach()
    mean_advantage, mean_logprob = masked_mean(x.advantages_N, x.mask_N), masked_mean(logprobs_N, x.mask_N)
    return (x.advantages_N - mean_advantage) * (logprobs_N - mean_logprob)
