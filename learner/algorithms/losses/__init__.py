"""Policy losses by name.

A loss takes a `LossInput` and returns a `TokenLoss`. Importance weights and aggregation come after it,
the same for all. Log-probs, ratios and losses are float32.
"""

from __future__ import annotations

from learner.algorithms.losses.clipped import cispo, geo_mean, gspo, m2po, reinforce, vanilla
from learner.algorithms.losses.covariance import clip_cov, kl_cov
from learner.algorithms.losses.smooth import dppo_kl, dppo_tv, dro, sapo
from learner.algorithms.losses.terms import Clip, LossConstants, LossInput, PolicyLossFn, TokenLoss

__all__ = ["POLICY_LOSSES", "Clip", "LossConstants", "LossInput", "PolicyLossFn", "TokenLoss"]

POLICY_LOSSES: dict[str, PolicyLossFn] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": reinforce,
    "reinforce": reinforce,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": geo_mean,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "m2po": m2po,
}
