"""Records of the registered rewards, by name.

Imports neither torch nor a reward's library. A reward that is added here is known to the replica, `plan`, the
planner, `asyncrl init` and evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.core.variants import RewardFacts
from rollout_service.rewards.rules.matching import FORMS

_RULES = "rollout_service.rewards.rules"
_GSM8K, _MATH, _DAPO = (f"{_RULES}.{name}" for name in ("gsm8k", "competition_math", "dapo_math"))
_MATCHING = f"{_RULES}.matching"

REWARDS: Mapping[str, RewardFacts] = {
    "gsm8k": RewardFacts(f"{_GSM8K}:score_strict", answer=f"{_GSM8K}:extract_strict"),
    "gsm8k_flexible": RewardFacts(f"{_GSM8K}:score_flexible", answer=f"{_GSM8K}:extract_flexible"),
    "math": RewardFacts(f"{_MATH}:score_math", answer=f"{_MATH}:extract_boxed"),
    "math_dapo": RewardFacts(f"{_DAPO}:score_math_dapo", answer=f"{_DAPO}:extract_dapo"),
    "math_verify": RewardFacts(
        f"{_RULES}.equivalence:score_math_verify", is_pooled=True, answer=f"{_MATH}:extract_boxed"
    ),
    "exact_match": RewardFacts(f"{_MATCHING}:score_exact_match", compares_text=True),
    "digit_sort": RewardFacts(f"{_MATCHING}:score_digit_sort", compares_text=True),
    "format": RewardFacts(f"{_MATCHING}:score_format", is_pooled=True, forms=FORMS),
    "code_execution": RewardFacts(part=f"{_RULES}.code_execution:CodeExecution"),
    "model": RewardFacts(has_model=True),
    "judge": RewardFacts(has_model=True, is_judge=True),
}
