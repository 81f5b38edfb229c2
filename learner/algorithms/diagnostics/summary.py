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
PER_TOKEN = ("ref", "values", "adv", "update_critic", "update_actor")
"""Stages that compute on prompt and response tokens."""


def score_metrics(scores_R: torch.Tensor, rewards_R: torch.Tensor, length_R: torch.Tensor) -> Metrics:
    """Return `critic/score/*` before and `critic/rewards/*` after a KL penalty, of rows with an answer."""
    is_answered_R = length_R > 0
    return {
        **spread("critic/score", scores_R[is_answered_R]),
        **spread("critic/rewards", rewards_R[is_answered_R]),
    }


def target_spreads(
    advantages_N: torch.Tensor, returns_N: torch.Tensor, mask_N: torch.Tensor, values_N: torch.Tensor | None
) -> Metrics:
    """Return advantages, returns and, with a critic, values over the mask."""
    is_in_N = mask_N != 0
    metrics = {
        **spread("critic/advantages", advantages_N[is_in_N]),
        **spread("critic/returns", returns_N[is_in_N]),
    }
    return metrics if values_N is None else metrics | spread("critic/values", values_N[is_in_N])


def length_metrics(
    prompt_R: torch.Tensor, answer_R: torch.Tensor, is_prompt_cut_R: torch.Tensor, is_cut_R: torch.Tensor
) -> Metrics:
    """Return lengths of prompts and answers, and the shares of those that a limit has cut."""
    is_answered_R = answer_R > 0
    return {
        **spread("response_length", answer_R),
        "response_length/clip_ratio": _share(is_cut_R),
        **spread("response_length_non_aborted", answer_R[is_answered_R]),
        "response_length_non_aborted/clip_ratio": _share(is_cut_R[is_answered_R]),
        "response/aborted_ratio": _share(~is_answered_R),
        **spread("prompt_length", prompt_R),
        "prompt_length/clip_ratio": _share(is_prompt_cut_R),
    }


def per_token_metrics(seconds: Mapping[str, float], counts: Mapping[str, float]) -> Metrics:
    """Return `timing_per_token_ms/*` of the stages of `counts`, their numbers of tokens, that were timed."""
    return {
        f"timing_per_token_ms/{stage}": 1000 * seconds[stage] / count if count else 0.0
        for stage, count in counts.items()
        if stage in seconds
    }


def throughput_metrics(num_tokens: Sequence[int], step_s: float, num_devices: int) -> Metrics:
    """Return tokens of the step and tokens per second and device."""
    total = sum(num_tokens)
    return {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": step_s,
        "perf/throughput": total / (step_s * num_devices),
    }


def power_moments(
    advantages_N: torch.Tensor,
    logprobs_N: torch.Tensor,
    sum_pi_squared_N: torch.Tensor,
    mask_N: torch.Tensor,
    rows: Rows,
    weights_N: torch.Tensor | None,
) -> Metrics:
    """Return the means over rows from which `signal_and_noise` is made."""
    weight_R = rows.sum(token_weights(logprobs_N, sum_pi_squared_N, weights_N), mask_N)
    square_R = rows.mean(advantages_N, mask_N).square()
    columns = {"power": square_R * weight_R, "a_squared": square_R, "w": weight_R}
    return {column: float(values_R.double().mean()) for column, values_R in columns.items()}


def signal_and_noise(moments: Mapping[str, float], gradient_norm: float, num_rows: float) -> Metrics:
    """Return `variance_proxy/*` of a batch of `num_rows` rows."""
    signal, power = gradient_norm**2, moments["power"]
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy2_total_power": power,
        "variance_proxy/proxy3_pure_noise": max(0.0, (power - signal) / max(num_rows - 1, 1)),
        "variance_proxy/expected_a_squared": moments["a_squared"],
        "variance_proxy/expected_w": moments["w"],
    }


def spread(name: str, values: torch.Tensor) -> Metrics:
    """Return `name`/mean, /max and /min; not a number where there is no value."""
    if not len(values):
        return dict.fromkeys((f"{name}/{part}" for part in ("mean", "max", "min")), math.nan)
    values = values.double()
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def _share(is_R: torch.Tensor) -> float:
    return float(is_R.double().mean()) if len(is_R) else 0.0
