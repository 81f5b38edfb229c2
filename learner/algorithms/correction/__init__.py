"""Off-policy correction: weights, rejection, veto, prox, and the presets."""

from __future__ import annotations

from learner.algorithms.correction.presets import is_policy_gradient, make_corrections
from learner.algorithms.correction.prox import interpolate_prox
from learner.algorithms.correction.rejection import Rejection, parse_rejections, reject, rejection_metrics
from learner.algorithms.correction.weights import Correction, importance_weights, raw_weights, veto_rows

__all__ = [
    "Correction",
    "Rejection",
    "importance_weights",
    "interpolate_prox",
    "is_policy_gradient",
    "make_corrections",
    "parse_rejections",
    "raw_weights",
    "reject",
    "rejection_metrics",
    "veto_rows",
]
