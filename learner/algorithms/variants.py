"""Advantage estimators and policy losses by name: one record for each, of what it is and needs (pure).

Imports no torch: the configuration, `plan`, the simulator and the learner all read these records. A variant
that is added here is known everywhere. Invariant: `function` is imported by who calls it, never here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VALUES, GREEDY, PROX, SUM_PI_SQUARED = "values", "greedy", "prox", "sum_pi_squared"
"""Inputs of an estimator besides rewards and groups: a critic's values, the reward of a greedy answer per
group, and two results of the pass over the batch at the start of a step."""


@dataclass(frozen=True)
class Estimator:
    """One advantage estimator.

    Attributes:
        function: `module:name` of what computes it.
        needs: What it reads besides rewards and groups.
        batch_wide: Why it needs the whole batch before its first token is trained; empty if it does not.
        is_discounted: Whether it reads `algorithm.gamma`.
    """

    function: str
    needs: frozenset[str] = frozenset()
    batch_wide: str = ""
    is_discounted: bool = False


@dataclass(frozen=True)
class PolicyLoss:
    """One policy loss.

    Attributes:
        function: `module:name` of what computes it.
        picks_tokens: It singles out tokens of the microbatch at hand.
        aggregation: The one aggregation that it has; empty if `algorithm.aggregation` chooses.
        has_dual_clip: Whether it reads `algorithm.dual_clip`.
    """

    function: str
    picks_tokens: bool = False
    aggregation: str = ""
    has_dual_clip: bool = False


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
    "gpg": PolicyLoss(f"{_LOSSES}.clipped:reinforce"),
    "reinforce": PolicyLoss(f"{_LOSSES}.clipped:reinforce"),
    "clip_cov": PolicyLoss(f"{_LOSSES}.covariance:clip_cov", picks_tokens=True),
    "kl_cov": PolicyLoss(f"{_LOSSES}.covariance:kl_cov", picks_tokens=True),
    "geo_mean": PolicyLoss(f"{_LOSSES}.clipped:geo_mean", aggregation="the mean over rows"),
    "sapo": PolicyLoss(f"{_LOSSES}.smooth:sapo", aggregation="seq-mean-token-mean"),
    "dppo_tv": PolicyLoss(f"{_LOSSES}.smooth:dppo_tv", has_dual_clip=True),
    "dppo_kl": PolicyLoss(f"{_LOSSES}.smooth:dppo_kl", has_dual_clip=True),
    "dro": PolicyLoss(f"{_LOSSES}.smooth:dro"),
    "m2po": PolicyLoss(f"{_LOSSES}.clipped:m2po", picks_tokens=True),
}


def needing(what: str) -> tuple[str, ...]:
    """Return the advantages that read `what`.

    >>> needing(GREEDY)
    ('remax',)
    """
    return tuple(name for name, one in ADVANTAGES.items() if what in one.needs)
