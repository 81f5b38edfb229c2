"""Numbers of one whole batch: scores, targets, lengths, time per token, gradient noise (pure).

Shapes: N packed positions, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from learner.algorithms.advantage.baselines import token_weights
from learner.algorithms.rows import Rows

Metrics = dict[str, float]
_PER_RESPONSE_TOKEN = ("gen",)
_PER_TOKEN = ("ref", "values", "adv", "update_critic", "update_actor")


def score_metrics(scores_R: torch.Tensor, rewards_R: torch.Tensor, length_R: torch.Tensor) -> Metrics:
    """Return `critic/score/*` before and `critic/rewards/*` after a KL penalty, of rows with an answer."""
    is_answered_R = length_R > 0
    return {
        **_spread("critic/score", scores_R[is_answered_R]),
        **_spread("critic/rewards", rewards_R[is_answered_R]),
    }


def target_metrics(
    advantages_N: torch.Tensor, returns_N: torch.Tensor, mask_N: torch.Tensor, values_N: torch.Tensor | None
) -> Metrics:
    """Return advantages, returns and, with a critic, values and explained variance over the mask."""
    is_in_N = mask_N != 0
    returns = returns_N[is_in_N]
    metrics = {
        **_spread("critic/advantages", advantages_N[is_in_N]),
        **_spread("critic/returns", returns),
    }
    if values_N is None:
        return metrics
    values = values_N[is_in_N]
    explained = 1 - (returns - values).var() / (returns.var() + 1e-5)
    return metrics | _spread("critic/values", values) | {"critic/vf_explained_var": float(explained)}


def length_metrics(prompt_R: torch.Tensor, answer_R: torch.Tensor, limits: tuple[int, int]) -> Metrics:
    """Return lengths of prompts and answers, and the shares at their limits (prompt, answer)."""
    prompt_R, answer_R = prompt_R.float(), answer_R.float()
    answered_R = answer_R[answer_R > 0]
    return {
        **_spread("response_length", answer_R, limits[1]),
        **_spread("response_length_non_aborted", answered_R, limits[1]),
        "response/aborted_ratio": float((answer_R == 0).float().mean()),
        **_spread("prompt_length", prompt_R, limits[0]),
    }


def timing_metrics(seconds: Mapping[str, float], num_response_tokens: int, num_tokens: int) -> Metrics:
    """Return `timing_s/*`, and `timing_per_token_ms/*` of the stages that have tokens to divide by."""
    metrics = {f"timing_s/{stage}": value for stage, value in seconds.items()}
    counts = dict.fromkeys(_PER_RESPONSE_TOKEN, num_response_tokens) | dict.fromkeys(_PER_TOKEN, num_tokens)
    for stage, count in counts.items():
        if stage in seconds:
            metrics[f"timing_per_token_ms/{stage}"] = 1000 * seconds[stage] / count if count else 0.0
    return metrics


def throughput_metrics(num_tokens: Sequence[int], step_s: float, num_devices: int) -> Metrics:
    """Return tokens of the step and tokens per second and device."""
    total = sum(num_tokens)
    return {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": step_s,
        "perf/throughput": total / (step_s * num_devices),
    }


def variance_proxies(
    advantages_N: torch.Tensor,
    logprobs_N: torch.Tensor,
    sum_pi_squared_N: torch.Tensor,
    mask_N: torch.Tensor,
    rows: Rows,
    gradient_norm: float,
    weights_N: torch.Tensor | None = None,
) -> Metrics:
    """Return how much of the gradient is signal: its squared norm against the expected one of a row."""
    weight_R = rows.sum(token_weights(logprobs_N, sum_pi_squared_N, weights_N), mask_N)
    square_R = rows.mean(advantages_N, mask_N).square()
    signal, power = gradient_norm**2, float((square_R * weight_R).mean())
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/proxy3_pure_noise": max(0.0, (power - signal) / max(rows.num_rows - 1, 1)),
        "variance_proxy/expected_a_squared": float(square_R.mean()),
        "variance_proxy/expected_w": float(weight_R.mean()),
    }


def mask_after_end(tokens_BT: torch.Tensor, end_ids: Sequence[int]) -> torch.Tensor:
    """Return 1 up to and including the first end token of each row, 0 after it (int64) [B, T]."""
    is_end_BT = torch.isin(tokens_BT, torch.tensor(list(end_ids)))
    return (is_end_BT.long().cumsum(1) - is_end_BT.long() == 0).long()


def reduce_by_name(values: Mapping[str, Sequence[float]]) -> Metrics:
    """Return each metric's maximum or minimum if its name says so, else its mean."""
    reduced = {}
    for name, found in values.items():
        if "max" in name or "min" in name:
            reduced[name] = max(found) if "max" in name else min(found)
        else:
            reduced[name] = sum(found) / len(found)
    return reduced


def _spread(name: str, x: torch.Tensor, limit: int | None = None) -> Metrics:
    if not len(x):
        found = dict.fromkeys((f"{name}/{part}" for part in ("mean", "max", "min")), math.nan)
    else:
        found = {
            f"{name}/mean": float(x.mean()),
            f"{name}/max": float(x.max()),
            f"{name}/min": float(x.min()),
        }
    if limit is not None:
        found[f"{name}/clip_ratio"] = float((x == limit).float().mean()) if len(x) else 0.0
    return found
