"""Description of a rank's share of a batch: lengths, rewards, spans, targets.

Owns the values of this rank alone, and beside them the values from which `reduction.reduce_over_ranks` makes
those of the whole batch: `weight/<over>` (weight of this share in a mean) and `moment/<over>/<name>` (means
from which a variance or correlation is made). Neither reaches the metrics row. The definitions are those of
`algorithms.diagnostics`, which the oracle checks. Invariant: every rank gives the same names, whatever its
share holds; a mean of nothing is NaN, a maximum of nothing -inf.

Shapes: N packed positions, R rows (trajectories).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.staleness import UNLOADED
from learner.algorithms.diagnostics.moments import probability_moments, value_moments
from learner.algorithms.diagnostics.summary import (
    length_metrics,
    power_moments,
    score_metrics,
    spread,
    target_spreads,
)
from learner.algorithms.rows import Rows, first_rows
from learner.batching.batch import PackedBatch
from learner.batching.shared_prompts import measure_work

Metrics = dict[str, float]


def describe_batch(
    groups: Sequence[Group], batch: PackedBatch, max_prompt_tokens: int, *, shares_prompts: bool = False
) -> Metrics:
    """Return lengths, turns and version spans of a share.

    Args:
        groups: Of this share.
        batch: The same groups packed, before any token was masked.
        max_prompt_tokens: The limit on prompts: those that reach it count in `prompt_length/clip_ratio`.
        shares_prompts: Whether the model computes once what rows of a group share.

    `response_length/clip_ratio` is the share cut at the token limit, as the sampler says; verl takes the
    responses as long as its padded width for it.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    answered = [trajectory for trajectory in trajectories if trajectory.num_tokens]
    prompt_R = torch.tensor([len(group.prompt_ids) for group in groups for _ in group.trajectories])
    answer_R = torch.tensor([trajectory.num_tokens for trajectory in trajectories])
    is_cut_R = torch.tensor([trajectory.finish_reason == "length" for trajectory in trajectories])
    work = measure_work(batch, is_shared=shares_prompts)
    turns_R = torch.tensor([_count_turns(trajectory) for trajectory in trajectories])
    metrics = {
        **length_metrics(prompt_R, answer_R, prompt_R == max_prompt_tokens, is_cut_R),
        **spread("num_turns", turns_R),
        **_describe_staleness(answered, batch),
        "perf/total_num_tokens": float(batch.num_tokens),
        "perf/computed_tokens": float(work.num_tokens),
        "perf/attention_pairs": work.num_pairs,
        "weight/rows": float(len(trajectories)),
        "weight/answered rows": float(len(answered)),
    }
    return _without_nothing(metrics)


def describe_rewards(batch: PackedBatch, prepared: PackedBatch) -> Metrics:
    """Return rewards before and after the KL penalty, of the share's answered rows.

    Args:
        batch: The share as it came.
        prepared: Of its groups those that are trained, as the objective prepared them. The others were never
            shown to the reference: nothing is taken off their rewards.
    """
    kept = torch.tensor(prepared.tickets_G, dtype=torch.long)
    is_kept_R = torch.isin(torch.tensor(batch.tickets_G)[batch.group_R], kept)
    rewards_R = batch.rewards_R.clone()
    rewards_R[is_kept_R] = prepared.rewards_R
    length_R = torch.bincount(batch.row_N[batch.version_N > UNLOADED], minlength=batch.num_rows)
    episodes = first_rows(batch.episode_R)
    return _without_nothing(score_metrics(batch.rewards_R[episodes], rewards_R[episodes], length_R[episodes]))


def describe_baselines(batch: PackedBatch) -> Metrics:
    """Return the mean reward of the greedy answers, of every row of the share that has one.

    Args:
        batch: The share as it came: a share whose groups are all over age has greedy answers too.
    """
    nothing_R = torch.tensor([math.nan])
    baseline_R = nothing_R if batch.baseline_R is None else batch.baseline_R
    return {"critic/greedy_score/mean": float(baseline_R.nanmean())}


def describe_targets(batch: PackedBatch) -> Metrics:
    """Return advantages, returns and values over trained tokens.

    Args:
        batch: As the loss gets it: with advantages, and with values and returns if the objective has them.
            The advantages stand for returns that are not there: the estimator has no others.
    """
    assert batch.advantages_N is not None, "the targets are there once the objective has prepared them"
    is_trained_N = batch.loss_mask_N > 0
    returns_N = batch.advantages_N if batch.returns_N is None else batch.returns_N
    metrics = target_spreads(batch.advantages_N, returns_N, batch.loss_mask_N, batch.values_N)
    metrics["weight/trained tokens"] = float(is_trained_N.sum())
    if batch.values_N is not None:
        moments = value_moments(returns_N[is_trained_N], batch.values_N[is_trained_N])
        metrics |= {f"moment/trained tokens/{name}": value for name, value in moments.items()}
    return _without_nothing(metrics | _describe_power(batch))


def _describe_power(batch: PackedBatch) -> Metrics:
    """Return what `variance_proxy/*` are made from, if the advantage asks for what they need."""
    if batch.sum_pi_squared_N is None or batch.prox_N is None or batch.advantages_N is None:
        return {}
    moments = power_moments(
        batch.advantages_N,
        batch.prox_N,
        batch.sum_pi_squared_N,
        batch.loss_mask_N,
        Rows(batch.row_N, batch.num_rows),
        batch.weights_N,
    )
    named = {f"moment/trained rows/{name}": value for name, value in moments.items()}
    return named | {"weight/trained rows": float(batch.num_rows)}


def describe_probabilities(batch: PackedBatch, valid_N: torch.Tensor) -> Metrics:
    """Return how far the trainer's probabilities are from the sampler's; nothing without prox log-probs.

    Args:
        batch: With prox log-probs, if the objective has them.
        valid_N: 1 at tokens within the bound on lag, also those that a correction rejects later.
    """
    if batch.prox_N is None:
        return {}
    is_valid_N = valid_N > 0
    trainer, sampler = batch.prox_N[is_valid_N].exp(), batch.behaviour_N[is_valid_N].exp()
    moments = probability_moments(trainer, sampler)
    found = {
        "rollout_probs_diff_valid": float(len(trainer) > 0),
        "rollout_probs_diff_max": float((trainer - sampler).abs().max()) if len(trainer) else -math.inf,
        "rollout_probs_diff_mean": moments["probs_diff"],
    }
    return {
        **{f"training/{name}": value for name, value in found.items()},
        **{f"moment/tokens in bound/{name}": value for name, value in moments.items()},
        "weight/tokens in bound": float(len(trainer)),
    }


def _describe_staleness(answered: Sequence[Trajectory], batch: PackedBatch) -> Metrics:
    versions = [[span.version for span in trajectory.spans] for trajectory in answered]
    is_response_N = batch.version_N > UNLOADED
    rows, lags = batch.row_N[is_response_N], batch.lag_N[is_response_N]
    has_response_R = torch.bincount(rows, minlength=batch.num_rows) > 0
    edges = [
        torch.zeros(batch.num_rows, dtype=lags.dtype).scatter_reduce(0, rows, lags, edge, include_self=False)
        for edge in ("amin", "amax")
    ]
    newest, oldest = (edge_R[has_response_R] for edge_R in edges)
    spans = torch.tensor([max(found) - min(found) + 1 for found in versions])
    return {
        **spread("training/off_policy/trajectory_spans", spans),
        **spread("training/off_policy/trajectory_staleness", newest),
        **spread("training/off_policy/trajectory_staleness_worst", oldest),
    }


def _count_turns(trajectory: Trajectory) -> int:
    """The prompt, and each run of sampled or of observed tokens; verl counts chat messages."""
    mask_T = trajectory.loss_mask
    return 1 + int(len(mask_T) > 0) + int(np.count_nonzero(mask_T[1:] != mask_T[:-1]))


def _without_nothing(metrics: Metrics) -> Metrics:
    """Return `metrics` with what a maximum and a minimum of nothing are: other ranks have values."""
    nothing = {"max": -math.inf, "min": math.inf}
    return {
        name: nothing.get(name.rpartition("/")[2], value) if math.isnan(value) else value
        for name, value in metrics.items()
    }
