"""What a rank's share of a batch looks like: lengths, rewards, spans, targets.

Owns the values of this rank alone, and beside them what `reduction.reduce_over_ranks` needs to make
those of the whole batch: `weight/<over>` (how much this share weighs in a mean) and `moment/<name>`
(means from which a variance or correlation is made). Neither reaches the metrics row. Invariant: every
rank gives the same names, whatever its share holds; a mean of nothing is NaN, a maximum of nothing -inf.

Shapes: N packed positions, R rows (trajectories).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.experience import Group, Trajectory
from asyncrl.versions import UNLOADED
from learner.batching.batch import PackedBatch

Metrics = dict[str, float]


def describe_batch(groups: Sequence[Group], batch: PackedBatch, max_prompt_tokens: int = 0) -> Metrics:
    """Return rewards, lengths, turns and version spans of a share.

    Args:
        groups: Of this share.
        batch: The same groups packed, before any token was masked.
        max_prompt_tokens: The limit on prompts, for `prompt_length/clip_ratio`; 0 leaves that out.

    `response_length/clip_ratio` is the share cut at the token limit, as the sampler says; verl takes the
    responses as long as its padded width for it.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    answered = [trajectory for trajectory in trajectories if trajectory.num_tokens]
    rewards = [trajectory.reward for trajectory in answered]
    prompt_lengths = [len(group.prompt_ids) for group in groups for _ in group.trajectories]
    is_cut = [trajectory.finish_reason == "length" for trajectory in trajectories]
    is_cut_answered = [trajectory.finish_reason == "length" for trajectory in answered]
    metrics = {
        **_spread("critic/score", rewards),
        **_spread("critic/rewards", rewards),
        **_spread("response_length", [trajectory.num_tokens for trajectory in trajectories]),
        **_spread("response_length_non_aborted", [trajectory.num_tokens for trajectory in answered]),
        **_spread("prompt_length", prompt_lengths),
        **_spread("num_turns", [_count_turns(trajectory) for trajectory in trajectories]),
        "response_length/clip_ratio": _mean(is_cut),
        "response_length_non_aborted/clip_ratio": _mean(is_cut_answered),
        "response/aborted_ratio": _mean([not trajectory.num_tokens for trajectory in trajectories]),
        **_describe_staleness(answered, batch),
        "perf/total_num_tokens": float(batch.num_tokens),
        "perf/attention_pairs": _count_pairs(batch),
        "weight/rows": float(len(trajectories)),
        "weight/answered rows": float(len(answered)),
    }
    if max_prompt_tokens:
        metrics["prompt_length/clip_ratio"] = _mean([n >= max_prompt_tokens for n in prompt_lengths])
    return metrics


def describe_targets(batch: PackedBatch) -> Metrics:
    """Return advantages, returns, values, and how far prox is from the sampler, over trained tokens.

    Args:
        batch: As the loss gets it: with advantages, and with prox, values and returns if the objective has
            them. The advantages stand for returns that are not there: the estimator has no others.
    """
    assert batch.advantages_N is not None, "the targets are there once the objective has prepared them"
    is_trained_N = batch.loss_mask_N > 0
    advantages = batch.advantages_N[is_trained_N].double()
    returns = advantages if batch.returns_N is None else batch.returns_N[is_trained_N].double()
    metrics = {
        **_spread("critic/advantages", advantages),
        **_spread("critic/returns", returns),
        "weight/trained tokens": float(len(advantages)),
    }
    if batch.values_N is not None:
        values = batch.values_N[is_trained_N].double()
        metrics |= _spread("critic/values", values)
        metrics |= _moments({"returns": returns, "value_errors": returns - values})
    if batch.prox_N is not None:
        trainer, sampler = batch.prox_N[is_trained_N].exp(), batch.behaviour_N[is_trained_N].exp()
        metrics |= _compare_probabilities(trainer.double(), sampler.double())
    return metrics


def _compare_probabilities(trainer: torch.Tensor, sampler: torch.Tensor) -> Metrics:
    difference = (trainer - sampler).abs()
    return {
        "training/rollout_probs_diff_valid": float(len(difference) > 0),
        "training/rollout_probs_diff_max": float(difference.max()) if len(difference) else -math.inf,
        "training/rollout_probs_diff_mean": float(difference.mean()),
        **_moments({"probs_diff": difference, "trainer": trainer, "sampler": sampler}),
        "moment/trainer_sampler": float((trainer * sampler).mean()),
    }


def _moments(columns: dict[str, torch.Tensor]) -> Metrics:
    return {
        name: value
        for column, values in columns.items()
        for name, value in (
            (f"moment/{column}", float(values.mean())),
            (f"moment/{column}_squared", float(values.square().mean())),
        )
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
    newest, oldest = (edge_R[has_response_R].double() for edge_R in edges)
    spans = [max(found) - min(found) + 1 for found in versions]
    return {
        **_spread("training/off_policy/trajectory_spans", spans),
        **_spread("training/off_policy/trajectory_staleness", newest),
        **_spread("training/off_policy/trajectory_staleness_worst", oldest),
    }


def _count_turns(trajectory: Trajectory) -> int:
    """The prompt, and each run of sampled or of observed tokens; verl counts chat messages."""
    mask_T = trajectory.loss_mask
    return 1 + int(len(mask_T) > 0) + int(np.count_nonzero(mask_T[1:] != mask_T[:-1]))


def _count_pairs(batch: PackedBatch) -> float:
    """Pairs of a query and a key that causal attention computes, over all rows."""
    lengths = np.diff(np.asarray(batch.cu_seqlens, dtype=np.float64))
    return float((lengths * (lengths + 1) / 2).sum())


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _spread(name: str, values: Sequence[float] | torch.Tensor) -> Metrics:
    found = np.asarray(values, dtype=np.float64)
    has_any = len(found) > 0
    return {
        f"{name}/mean": float(found.mean()) if has_any else math.nan,
        f"{name}/max": float(found.max()) if has_any else -math.inf,
        f"{name}/min": float(found.min()) if has_any else math.inf,
    }
