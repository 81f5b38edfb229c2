"""Off-policy correction: weights, rejection, veto, prox, and the presets of `presets`."""

from __future__ import annotations

from learner.algorithms.correction.rejection import reject, rejection_metrics
from learner.algorithms.correction.weights import importance_weights, interpolate_prox, raw_weights, veto_rows
from learner.algorithms.presets import Correction, Rejection, make_corrections, parse_rejections

__all__ = [
    "Correction",
    "Rejection",
    "importance_weights",
    "interpolate_prox",
    "make_corrections",
    "parse_rejections",
    "raw_weights",
    "reject",
    "rejection_metrics",
    "veto_rows",
]
