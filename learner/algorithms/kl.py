"""KL to a reference policy: estimators per token, penalty on the reward, coefficient (pure).

Shapes: N packed positions, R rows; the estimators take any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from learner.algorithms.rows import Rows, clamp_log_ratio, masked

KEPT = "kl_coef"
KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


def kl_penalty(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the estimate of KL(current, reference) at each token.

    A `+` behind the kind takes its value and the gradient of k2, which is unbiased.
    """
    base = kind.removesuffix("+")
    assert base in KINDS, kind
    difference = logprobs - reference
    if kind.endswith("+"):
        square = 0.5 * difference.square()
        return square - square.detach() + kl_penalty(logprobs, reference, base).detach()
    if base in ("k1", "kl"):
        return difference
    if base == "abs":
        return difference.abs()
    if base in ("k2", "mse"):
        return 0.5 * difference.square()
    bounded = clamp_log_ratio(-difference)
    return (bounded.exp() - bounded - 1).clamp(-10.0, 10.0)


@dataclass(frozen=True)
class Penalty:
    """KL taken off the reward: `kl_N` per token, 0 outside the mask, and its mean over rows' means."""

    kl_N: torch.Tensor
    mean: float


def measure_penalty(
    logprobs_N: torch.Tensor, reference_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, kind: str
) -> Penalty:
    """Return what a coefficient multiplies; a row without tokens counts as 0."""
    kl_N = masked(kl_penalty(logprobs_N, reference_N, kind), mask_N).detach()
    mean_R = rows.mean(kl_N, mask_N)
    return Penalty(kl_N, float(mean_R.mean()) if rows.num_rows else 0.0)


class KlController(Protocol):
    """Owns the coefficient of the KL term. Update it after the coefficient was used."""

    @property
    def value(self) -> float:
        """The coefficient in force."""

    def update(self, kl: float, num_rows: float) -> None:
        """Take in the KL of one learner step, over all ranks, and its number of rows."""

    def state(self) -> dict[str, float]:
        """Return what training has made of it, which a checkpoint must keep."""

    def restore(self, state: Mapping[str, float]) -> None:
        """Take what `state` gave, of a controller of any kind."""

    def turn_off(self) -> None:
        """Use 0 from now on, which no update leaves."""


class FixedKl:
    """A constant coefficient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, kl: float, num_rows: float) -> None:
        """Change nothing."""

    def state(self) -> dict[str, float]:
        """Return nothing: a resume may change the configured coefficient, which is in force."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Change nothing."""

    def turn_off(self) -> None:
        """Use 0 from now on."""
        self.value = 0.0


class AdaptiveKl:
    """Moves the coefficient so that the KL stays near `target`; arXiv 1909.08593.

    Each step it is multiplied by 1 + clip(kl / target - 1, -0.2, 0.2) * rows / horizon.
    """

    def __init__(self, value: float, target: float, horizon: float) -> None:
        assert target > 0 and horizon > 0, "target and horizon are above 0"
        self.value = value
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_rows: float) -> None:
        """Move the coefficient by at most 20 % times rows / horizon; one that is 0 stays 0."""
        if not math.isfinite(kl):  # a coefficient that is not a number would stay so
            return
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        self.value *= 1 + error * num_rows / self._horizon

    def state(self) -> dict[str, float]:
        """Return the coefficient."""
        return {KEPT: self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take the coefficient, if an adaptive one was kept."""
        self.value = state.get(KEPT, self.value)

    def turn_off(self) -> None:
        """Use 0 from now on, which no update leaves."""
        self.value = 0.0
