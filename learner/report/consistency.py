"""Consistency of a step: does the engine hold the learner's weights, and did the update do what it was for?

Owns three measures that the guard judges: the gap in log-probs on tokens that the weights being trained have
sampled, the distance that the step moved the policy, and whether it moved towards the advantages. Needs prox
log-probs: without them nothing is measured. The last two cost a forward pass over at most `CHECKED_SHARE`
of the batch.

Shapes: N packed positions, R rows, G groups.
"""

from __future__ import annotations

import math

import torch

from learner.backend import LearnerBackend
from learner.batching.batch import PackedBatch

Metrics = dict[str, float]

CHECKED_SHARE = 8
"""One in so many groups that have an advantage is looked at again after the step."""
_NOTHING = dict.fromkeys(("actor/step_kl", "actor/step_gain"), math.nan) | {"weight/checked tokens": 0.0}


def describe_engine_gap(batch: PackedBatch, valid_N: torch.Tensor, *, keeps_cache: bool) -> Metrics:
    """Return how far the engine's log-probs are from the learner's where both have the same weights.

    Tokens of lag 0 count. Where a swap keeps the cache only rows count whose every sampled token has lag 0:
    others had keys of older weights.

    Args:
        batch: With prox log-probs, if the objective has them.
        valid_N: 1 at tokens within the bound on lag, also those that a correction rejects later.
        keeps_cache: Whether `rollout.kv_cache` is `keep`.
    """
    if batch.prox_N is None:
        return {}
    is_older_N = (batch.counted_N > 0) & (batch.lag_N > 0)
    is_current_N = (valid_N > 0) & ~is_older_N
    if keeps_cache:
        num_older_R = torch.zeros(batch.num_rows).index_add_(0, batch.row_N, is_older_N.float())
        is_current_N &= num_older_R[batch.row_N] == 0
    gap_N = (batch.prox_N - batch.behaviour_N).abs()[is_current_N]
    has_any = len(gap_N) > 0
    return {
        "weights/engine_gap_mean": float(gap_N.mean()) if has_any else math.nan,
        "weights/engine_gap_max": float(gap_N.max()) if has_any else -math.inf,
        "weights/engine_gap_tokens": float(len(gap_N)),
        "weight/current tokens": float(len(gap_N)),
    }


def check_update(batch: PackedBatch, policy: LearnerBackend) -> Metrics:
    """Return how far the step moved the policy, and which way, on a part of `batch`. Collective.

    Args:
        batch: As the objective prepared it for the step that `policy` has just been trained on.
    """
    if batch.prox_N is None or batch.advantages_N is None:
        return {}
    checked = batch.select_groups(_choose(batch))
    logprobs_N, _ = policy.logprobs(checked)
    assert checked.prox_N is not None and checked.advantages_N is not None, "the batch has them"
    is_in_N = checked.loss_mask_N > 0
    if not is_in_N.any():
        return dict(_NOTHING)
    moved_N = (logprobs_N - checked.prox_N)[is_in_N].double()
    advantages_N = checked.advantages_N[is_in_N].double()
    most = float((advantages_N * moved_N).abs().sum())
    return {
        "actor/step_kl": float((moved_N.exp() - moved_N - 1).mean()),
        "actor/step_gain": float((advantages_N * moved_N).sum()) / most if most else math.nan,
        "weight/checked tokens": float(len(moved_N)),
    }


def _choose(batch: PackedBatch) -> list[int]:
    """Return every so many of the groups whose advantages are not all zero: some of each minibatch."""
    assert batch.advantages_N is not None, "asked before"
    size_N = (batch.advantages_N * batch.loss_mask_N).abs()
    size_G = torch.zeros(len(batch.tickets_G)).index_add_(0, batch.group_R[batch.row_N], size_N)
    told = [ticket for ticket, size in zip(batch.tickets_G, size_G.tolist(), strict=True) if size > 0]
    return sorted(told)[::CHECKED_SHARE]  # of parts they come as they were complete
