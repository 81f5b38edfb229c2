"""Advantage estimators by name.

An estimator takes an `AdvantageInput` and returns an `Advantage`. Estimators that compare the rows of
a group give all tokens of a row one number; the others go by token. Which there are, `variants` says.
"""

from __future__ import annotations

from asyncrl.core.variants import function
from learner.algorithms import variants
from learner.algorithms.advantage.groups import is_constant
from learner.algorithms.advantage.terms import Advantage, AdvantageFn, AdvantageInput

__all__ = ["ADVANTAGES", "Advantage", "AdvantageFn", "AdvantageInput", "is_constant"]

ADVANTAGES: dict[str, AdvantageFn] = {
    name: function(one.function) for name, one in variants.ADVANTAGES.items()
}
