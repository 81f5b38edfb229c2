"""Records of the advantage estimators and policy losses, by name (pure).

Imports no torch. An estimator or loss that is added here is known to configuration, `plan`, the planner, the
learner and the documentation. Invariant: `function` is imported by who calls it, never here.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.core.variants import GREEDY, PROX, SUM_PI_SQUARED, VALUES, Estimator, PolicyLoss

_ADVANTAGE, _LOSSES = "learner.algorithms.advantage", "learner.algorithms.losses"
_WHITENS = "whitens them over the whole batch"
_HAS_CRITIC = "has a critic, which is trained on the whole batch before the policy"
_OF_THE_PASS = frozenset({PROX, SUM_PI_SQUARED})

ADVANTAGES: Mapping[str, Estimator] = {
    "grpo": Estimator(f"{_ADVANTAGE}.by_group:grpo"),
    "grpo_vectorized": Estimator(f"{_ADVANTAGE}.by_group:grpo"),
    "dr_grpo": Estimator(f"{_ADVANTAGE}.by_group:dr_grpo"),
    "grpo_passk": Estimator(f"{_ADVANTAGE}.by_group:grpo_passk"),
    "gdpo": Estimator(f"{_ADVANTAGE}.by_group:gdpo", batch_wide=_WHITENS),
    "rloo": Estimator(f"{_ADVANTAGE}.by_group:rloo"),
    "rloo_vectorized": Estimator(f"{_ADVANTAGE}.by_group:rloo_vectorized"),
    "opo": Estimator(f"{_ADVANTAGE}.by_group:opo"),
    "gpg": Estimator(
        f"{_ADVANTAGE}.by_group:gpg",
        batch_wide="scales them by the share of the whole batch's answers that scored",
    ),
    "reinforce_plus_plus": Estimator(
        f"{_ADVANTAGE}.returns:reinforce_plus_plus", batch_wide=_WHITENS, is_discounted=True
    ),
    "reinforce_plus_plus_baseline": Estimator(
        f"{_ADVANTAGE}.by_group:reinforce_plus_plus_baseline", batch_wide=_WHITENS
    ),
    "remax": Estimator(f"{_ADVANTAGE}.returns:remax", needs=frozenset({GREEDY})),
    "gae": Estimator(
        f"{_ADVANTAGE}.returns:gae",
        needs=frozenset({VALUES}),
        batch_wide=f"{_WHITENS} and {_HAS_CRITIC}",
        is_discounted=True,
    ),
    "vtrace": Estimator(
        f"{_ADVANTAGE}.returns:vtrace",
        needs=frozenset({VALUES, PROX}),
        batch_wide=_HAS_CRITIC,
        is_discounted=True,
        has_weights=True,
    ),
    "optimal_token_baseline": Estimator(f"{_ADVANTAGE}.baselines:optimal_token_baseline", needs=_OF_THE_PASS),
    "tir_optimal_token_baseline": Estimator(
        f"{_ADVANTAGE}.baselines:tir_optimal_token_baseline", needs=_OF_THE_PASS
    ),
}
LOSSES: Mapping[str, PolicyLoss] = {
    "vanilla": PolicyLoss(f"{_LOSSES}.clipped:vanilla", has_dual_clip=True),
    "gspo": PolicyLoss(f"{_LOSSES}.clipped:gspo"),
    "cispo": PolicyLoss(f"{_LOSSES}.clipped:cispo"),
    "gpg": PolicyLoss(f"{_LOSSES}.clipped:reinforce", is_policy_gradient=True),
    "reinforce": PolicyLoss(f"{_LOSSES}.clipped:reinforce", is_policy_gradient=True),
    "clip_cov": PolicyLoss(f"{_LOSSES}.covariance:clip_cov", picks_tokens=True),
    "kl_cov": PolicyLoss(f"{_LOSSES}.covariance:kl_cov", picks_tokens=True),
    "geo_mean": PolicyLoss(f"{_LOSSES}.clipped:geo_mean", aggregation="the mean over rows"),
    "sapo": PolicyLoss(f"{_LOSSES}.smooth:sapo", aggregation="seq-mean-token-mean"),
    "dppo_tv": PolicyLoss(f"{_LOSSES}.smooth:dppo_tv", has_dual_clip=True),
    "dppo_kl": PolicyLoss(f"{_LOSSES}.smooth:dppo_kl", has_dual_clip=True),
    "dro": PolicyLoss(f"{_LOSSES}.smooth:dro"),
    "m2po": PolicyLoss(f"{_LOSSES}.clipped:m2po", picks_tokens=True, compares_behaviour=True),
}
