"""Adapters of metrics, balance, rewards and primitives."""

from __future__ import annotations

from typing import Any

import torch

from learner.algorithms.diagnostics import summary
from learner.algorithms.diagnostics.moments import explained_variance, value_moments
from learner.algorithms.rows import masked, masked_mean, whiten
from learner.batching.balance import karmarkar_karp, measure_balance, plan_microbatches
from learner.numerics.fused_logprob import fused_logprobs
from rollout_service.rewards.rules import gsm8k
from rollout_service.rewards.rules.competition_math import score_math
from rollout_service.rewards.rules.dapo_math import score_math_dapo
from rollout_service.rewards.shaping import overlong_penalty
from tests.oracle.layout import lay_out

Given = dict[str, Any]
Found = dict[str, Any]


def name_metrics(found: dict[str, float]) -> Found:
    return {f"metric:{name}": value for name, value in found.items()}


def target_metrics(
    advantages_N: torch.Tensor, returns_N: torch.Tensor, mask_N: torch.Tensor, values_N: torch.Tensor | None
) -> dict[str, float]:
    """Return what the parts of a batch tell together, as `reduce_over_ranks` puts them together."""
    metrics = summary.target_spreads(advantages_N, returns_N, mask_N, values_N)
    if values_N is None:
        return metrics
    returns, values = returns_N[mask_N != 0], values_N[mask_N != 0]
    explained = explained_variance(value_moments(returns, values), len(values))
    return metrics | {"critic/vf_explained_var": explained}


def data(x: Given) -> Found:
    layout = lay_out(x["response_mask"])
    prompt_R, answer_R = x["prompt_attention_mask"].sum(1), x["response_attention_mask"].sum(1)
    mask_N = layout.flat(x["response_mask"])
    advantages_N, returns_N, values_N = (layout.flat(x[n]) for n in ("advantages", "returns", "values"))
    limits = x["prompt_attention_mask"].shape[1], x["response_attention_mask"].shape[1]
    scores = x["token_level_scores"].sum(1), x["token_level_rewards"].sum(1)
    return name_metrics(
        summary.score_metrics(*scores, answer_R)
        | target_metrics(advantages_N, returns_N, mask_N, values_N)
        | summary.length_metrics(prompt_R, answer_R, prompt_R == limits[0], answer_R == limits[1])
    )


def timing(x: Given) -> Found:
    answers, prompts = int(x["response_attention_mask"].sum()), int(x["prompt_attention_mask"].sum())
    seconds = x["timing_raw"]
    counts = {"gen": answers} | dict.fromkeys(summary.PER_TOKEN, answers + prompts)
    times = {f"timing_s/{stage}": value for stage, value in seconds.items()}
    return name_metrics(times | summary.per_token_metrics(seconds, counts))


def throughput(x: Given) -> Found:
    return name_metrics(summary.throughput_metrics(x["global_token_num"], x["step"], x["n_gpus"]))


def variance(x: Given) -> Found:
    layout = lay_out(x["response_mask"])
    advantages_N, logprobs_N, squares_N, mask_N = (
        layout.flat(x[name]) for name in ("advantages", "old_log_probs", "sum_pi_squared", "response_mask")
    )
    moments = summary.power_moments(advantages_N, logprobs_N, squares_N, mask_N, layout.rows, None)
    return name_metrics(summary.signal_and_noise(moments, x["gradient_norm"], layout.rows.num_rows))


def balance(x: Given) -> Found:
    parts = karmarkar_karp(x["seqlens"], x["k"], equal_size=x["equal_size"])
    return {
        "partitions": parts,
        "raw_partition_sums": [sum(x["seqlens"][row] for row in part) for part in parts],
        "stats": measure_balance(x["seqlens"], parts),
    }


def microbatches(x: Given, wanted: Found) -> Found:
    """The partition is a heuristic: every row once, no part over the budget, as many parts."""
    parts = plan_microbatches(x["seqlens"], x["max_token_len"])
    tokens = [sum(x["seqlens"][row] for row in part) for part in parts]
    is_whole = sorted(row for part in parts for row in part) == list(range(len(x["seqlens"])))
    is_right = is_whole and max(tokens) <= x["max_token_len"]
    return wanted if is_right and len(parts) == len(wanted["tokens"]) else {}


def reward_gsm8k(x: Given) -> Found:
    extracted = gsm8k.extract_strict(x["text"])
    return {
        "strict": gsm8k.score_strict(x["text"], x["gt"]),
        "flexible": gsm8k.score_flexible(x["text"], x["gt"]),
        "format01": gsm8k.score_answer(extracted, x["gt"], 0.1),
        "extracted": extracted,
    }


def reward_math(x: Given) -> Found:
    return {"score": score_math(x["text"], x["gt"]), "dapo": score_math_dapo(x["text"], x["gt"])}


def reward_math_dapo(x: Given) -> Found:
    return score_math_dapo(x["text"], x["gt"])


def overlong(x: Given) -> Found:
    lengths = x["lengths"].tolist()
    limits = x["max_resp_len"], x["buffer"], x["factor"]
    rewards = [x["base"] + overlong_penalty(length, *limits) for length in lengths]
    token_level = torch.zeros(len(lengths), x["max_resp_len"])
    for row, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        token_level[row, length - 1] = reward
    return {"reward": rewards, "token_level": token_level}


def masked_operations(x: Given) -> Found:
    values, mask = x["x"], x["mask"]
    layout = lay_out(mask)
    mean, count = masked_mean(values, mask), mask.sum()
    return {
        "sum": masked(values, mask).sum(),
        "mean": mean,
        "mean_axis1": layout.rows.mean(layout.flat(values), layout.flat(mask)),
        "var": masked_mean((values - mean).square(), mask) * count / (count - 1),
        "whiten": whiten(values, mask),
        "whiten_noshift": whiten(values, mask, shift_mean=False),
    }


def logits(x: Given) -> Found:
    values = x["logits"].flatten(0, 1)
    logprobs_N, entropy_N, squares_N = fused_logprobs(
        values,
        torch.eye(values.shape[1]),
        x["labels"].flatten(),
        vocab_size=values.shape[1],
        temperature=1.0,
        group=None,
        has_squares=True,
    )
    return {"logprobs": logprobs_N, "entropy": entropy_N, "sum_pi_squared": squares_N}
