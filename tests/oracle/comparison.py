"""Compares what we compute with what a case wants: rtol 1e-4, atol 1e-5; text and truth exactly."""

from __future__ import annotations

import math
from typing import Any

import torch

RTOL, ATOL = 1e-4, 1e-5
EXACT = ("mask", "partitions", "extracted")


def measure_error(got: Any, wanted: Any, key: str = "") -> float:
    """Return the largest absolute difference; infinity where `got` is not within the tolerance."""
    if isinstance(wanted, dict):
        if not isinstance(got, dict) or got.keys() != wanted.keys():
            return math.inf
        return max((measure_error(got[name], wanted[name], name) for name in wanted), default=0.0)
    if wanted is None or isinstance(wanted, str):
        return 0.0 if got == wanted else math.inf
    if isinstance(wanted, list) and key in ("partitions", "micro_batches"):
        return 0.0 if sorted(map(sorted, got)) == sorted(map(sorted, wanted)) else math.inf
    expected = torch.as_tensor(wanted, dtype=torch.float64)
    actual = torch.as_tensor(got, dtype=torch.float64)
    if expected.numel() != actual.numel():
        return math.inf
    actual = actual.reshape(expected.shape)
    tolerance = (0.0, 0.0) if key in EXACT else (RTOL, ATOL)
    if not torch.allclose(actual, expected, *tolerance, equal_nan=True):
        return math.inf
    difference = (actual - expected).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(difference.max()) if difference.numel() else 0.0


def find_misses(got: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the outputs that are absent or out of tolerance."""
    return [key for key in wanted if key not in got or measure_error(got[key], wanted[key], key) == math.inf]
