"""Centre of the clip, and the correction towards the behaviour policy around it (pure).

The centre is the policy whose log-probs the current ones are compared with, in four ways:

recomputed     of a forward pass at the start of the step; corrected once per step
behaviour      the sampler's own log-probs; there is nothing to correct
interpolated   between the sampler's and the current policy's, by age; corrected per microbatch
bypassed       the sampler's own; the current policy is corrected towards it per microbatch

Shapes: N packed positions, R rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from learner.algorithms.advantage.terms import on_one_rank
from learner.algorithms.correction import (
    Correction,
    importance_weights,
    interpolate_prox,
    reject,
    rejection_metrics,
    veto_rows,
)
from learner.algorithms.diagnostics import divergence
from learner.algorithms.rows import Rows, Sum
from learner.batching.batch import PackedBatch


@dataclass(frozen=True)
class Corrected:
    """Old log-probs, the tokens that are left, and their weights, None for 1."""

    old_N: torch.Tensor
    mask_N: torch.Tensor
    weights_N: torch.Tensor | None


class Centre(Protocol):
    """A way to have the centre of the clip."""

    @property
    def needs_prox(self) -> bool:
        """Whether `prepare` wants log-probs under the weights at the start of the step."""

    def prepare(
        self, batch: PackedBatch, prox_N: torch.Tensor | None, over_ranks: Sum
    ) -> tuple[PackedBatch, dict[str, float]]:
        """Return the batch of a step with what is known of all of it, and metrics of this rank's share."""

    def correct(self, logprobs_N: torch.Tensor, microbatch: PackedBatch) -> Corrected:
        """Return the centre of a microbatch, given the log-probs under the weights that are trained."""


def rows_of(batch: PackedBatch) -> Rows:
    """Return the rows of a packed batch."""
    return Rows(batch.row_N, batch.num_rows)


@dataclass(frozen=True)
class Recomputed:
    """See the module. `veto`: Ratio below which a token vetoes its row."""

    correction: Correction
    veto: float
    needs_prox: ClassVar[bool] = True

    def prepare(
        self, batch: PackedBatch, prox_N: torch.Tensor | None, over_ranks: Sum
    ) -> tuple[PackedBatch, dict[str, float]]:
        assert prox_N is not None, "a decoupled objective needs prox"
        batch, rows = dataclasses.replace(batch, prox_N=prox_N), rows_of(batch)
        before_N, delta_N = batch.loss_mask_N, prox_N - batch.behaviour_N
        metrics = _measure(prox_N, batch.behaviour_N, before_N, rows, self.correction)
        kept_N = veto_rows(delta_N, before_N, rows, self.veto)
        vetoed = before_N.sum() - kept_N.sum()
        metrics["rollout_corr/vetoed_share"] = float(vetoed / before_N.sum().clamp(min=1))
        batch = batch.with_mask(kept_N * reject(delta_N, before_N, rows, self.correction.rejection).ne(0))
        weights_N = _weights(delta_N, batch.loss_mask_N, rows, self.correction, over_ranks)
        return dataclasses.replace(batch, weights_N=weights_N), metrics

    def correct(self, logprobs_N: torch.Tensor, microbatch: PackedBatch) -> Corrected:
        return _prepared(microbatch)


@dataclass(frozen=True)
class Behaviour:
    """See the module."""

    needs_prox: ClassVar[bool] = False

    def prepare(
        self, batch: PackedBatch, prox_N: torch.Tensor | None, over_ranks: Sum
    ) -> tuple[PackedBatch, dict[str, float]]:
        return dataclasses.replace(batch, prox_N=batch.behaviour_N), {}

    def correct(self, logprobs_N: torch.Tensor, microbatch: PackedBatch) -> Corrected:
        return _prepared(microbatch)


@dataclass(frozen=True)
class PerMicrobatch:
    """Interpolated, or bypassed if `correction` says so. `veto`: Ratio below which a token vetoes its row."""

    correction: Correction
    veto: float
    needs_prox: ClassVar[bool] = False

    def prepare(
        self, batch: PackedBatch, prox_N: torch.Tensor | None, over_ranks: Sum
    ) -> tuple[PackedBatch, dict[str, float]]:
        return batch, {}

    def correct(self, logprobs_N: torch.Tensor, microbatch: PackedBatch) -> Corrected:
        if self.correction.is_bypass:
            old_N, target_N = microbatch.behaviour_N, logprobs_N.detach()
        else:
            old_N = target_N = interpolate_prox(logprobs_N, microbatch.behaviour_N, microbatch.lag_N)
        rows, delta_N = rows_of(microbatch), target_N - microbatch.behaviour_N
        kept_N = veto_rows(delta_N, microbatch.loss_mask_N, rows, self.veto)
        mask_N = kept_N * reject(delta_N, microbatch.loss_mask_N, rows, self.correction.rejection).ne(0)
        return Corrected(old_N, mask_N, _weights(delta_N, mask_N, rows, self.correction))


def make_centre(prox: str, correction: Correction, veto: float) -> Centre:
    """Return the centre that `algorithm.prox`, `algorithm.correction` and `algorithm.veto` name."""
    if prox == "behaviour":
        return Behaviour()
    is_recomputed = prox == "recompute" and not correction.is_bypass
    return Recomputed(correction, veto) if is_recomputed else PerMicrobatch(correction, veto)


def _prepared(microbatch: PackedBatch) -> Corrected:
    assert microbatch.prox_N is not None, "prepare must run before the loss"
    return Corrected(microbatch.prox_N, microbatch.loss_mask_N, microbatch.weights_N)


def _weights(
    delta_N: torch.Tensor,
    mask_N: torch.Tensor,
    rows: Rows,
    correction: Correction,
    over_ranks: Sum = on_one_rank,
) -> torch.Tensor | None:
    if correction.level is None:
        return None
    return importance_weights(delta_N, mask_N, rows, correction, over_ranks)


def _measure(
    prox_N: torch.Tensor, behaviour_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, correction: Correction
) -> dict[str, float]:
    is_empty = not mask_N.any()
    if is_empty:  # the same names on every rank, values without weight
        prox_N, behaviour_N, mask_N = torch.zeros(1), torch.zeros(1), torch.ones(1)
        rows = Rows(torch.zeros(1, dtype=torch.long), 1)
    metrics = divergence.off_policy_metrics(prox_N, behaviour_N, mask_N, rows)
    # Without weights of its own a run still logs what truncated token weights would look like.
    measured = correction if correction.level is not None else Correction(level="token")
    metrics |= divergence.importance_metrics(prox_N - behaviour_N, mask_N, rows, measured)
    metrics |= rejection_metrics(prox_N - behaviour_N, mask_N, rows, correction.rejection)
    prefixed = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    prefixed["rollout_corr/empty_batch"] = float(is_empty)
    return prefixed
