"""Every function of a vector set, and the adapter that computes it with our code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.oracle import corrections, measures, policies
from tests.oracle.comparison import find_misses, measure_error
from tests.oracle.vectors import Case

ADVANTAGE_NAMES = {
    "gae": "gae",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "grpo_vectorized": "grpo_vectorized",
    "gdpo_single": "gdpo",
    "grpo_passk": "grpo_passk",
    "rloo": "rloo",
    "rloo_vectorized": "rloo_vectorized",
    "opo": "opo",
    "gpg": "gpg",
    "rfpp_baseline": "reinforce_plus_plus_baseline",
    "rfpp": "reinforce_plus_plus",
    "remax": "remax",
    "otb": "optimal_token_baseline",
    "otb_is": "optimal_token_baseline",
    "tir_otb": "tir_optimal_token_baseline",
}
FAMILIES: dict[str, Callable[..., dict[str, Any]]] = {
    **{theirs: policies.advantage(ours) for theirs, ours in ADVANTAGE_NAMES.items()},
    "agg_loss": policies.aggregation,
    "value_loss": policies.critic_loss,
    "kl_penalty": policies.kl,
    "compute_rewards": policies.reward_penalty,
    "policy_loss": policies.policy_loss,
    "policy_loss_clip_cov": policies.policy_loss_clip_cov,
    "rollout_correction_weights": corrections.weights,
    "rollout_rejection_mask": corrections.rejection,
    "offpolicy_metrics": corrections.off_policy,
    "rollout_correction_full": corrections.whole_correction,
    "policy_loss_bypass": policies.policy_loss_bypass,
    "data_metrics": measures.data,
    "timing_metrics": measures.timing,
    "throughput_metrics": measures.throughput,
    "debug_metrics": corrections.probabilities,
    "variance_proxy": measures.variance,
    "adaptive_kl": policies.adaptive_kl,
    "kk": measures.balance,
    "rearrange_micro_batches": measures.microbatches,
    "gsm8k": measures.reward_gsm8k,
    "math": measures.reward_math,
    "math_dapo": measures.reward_math_dapo,
    "overlong": measures.overlong,
    "masked_ops": measures.masked_operations,
    "logits_ops": measures.logits,
}
JUDGED = ("policy_loss_clip_cov", "rearrange_micro_batches")
"""Right by number and membership: the adapter sees what is wanted."""


def run_case(case: Case) -> tuple[list[str], float]:
    """Return the outputs that missed, and the worst error of the others."""
    if case.function not in FAMILIES:
        return ["no such function"], math.inf
    family = FAMILIES[case.function]
    got = family(case.given, case.wanted) if case.function in JUDGED else family(case.given)
    misses = find_misses(got, case.wanted)
    errors = [measure_error(got[key], case.wanted[key], key) for key in case.wanted if key not in misses]
    return misses, max(errors, default=0.0)
