"""Policy losses by name.

A loss takes a `LossInput` and returns a `TokenLoss`. Importance weights and aggregation come after it,
the same for all. Log-probs, ratios and losses are float32. Which there are, `variants` says.
"""

from __future__ import annotations

from asyncrl.core.variants import function
from learner.algorithms import variants
from learner.algorithms.losses.terms import Clip, LossConstants, LossInput, PolicyLossFn, TokenLoss

__all__ = ["POLICY_LOSSES", "Clip", "LossConstants", "LossInput", "PolicyLossFn", "TokenLoss"]

POLICY_LOSSES: dict[str, PolicyLossFn] = {
    name: function(one.function) for name, one in variants.LOSSES.items()
}
