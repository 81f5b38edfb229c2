"""The objective of a run: advantage, correction, loss and aggregation put together.

Owns the order in which they apply. Per step: `prepare` once on the whole batch, then `loss` for every
microbatch. Invariant S3: no token over `max_lag` enters a loss; it is asserted here once more.

Shapes: N packed positions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from asyncrl.config.tree import AlgorithmSection
from learner.algorithms import diagnostics
from learner.algorithms.advantage import ADVANTAGES, AdvantageFn, is_constant
from learner.algorithms.aggregation import aggregate
from learner.algorithms.correction import Correction, importance_weights, make_corrections, veto_rows
from learner.algorithms.policy_loss import POLICY_LOSSES, Clip, LossInput, PolicyLossFn, reinforce
from learner.algorithms.registry import resolve
from learner.algorithms.rows import Rows, masked, masked_mean
from learner.batch import PackedBatch


@dataclass(frozen=True)
class Objective:
    """What is minimised. Make it with `make_objective`."""

    advantage: AdvantageFn
    policy_loss: PolicyLossFn
    correction: Correction
    clip: Clip
    aggregation: str
    loss_scale: float
    veto: float
    max_lag: int

    @property
    def needs_prox(self) -> bool:
        """Whether `prepare` wants log-probs under the weights at the start of the step."""
        return not self.correction.is_bypass

    def prepare(
        self, batch: PackedBatch, prox_N: torch.Tensor | None, entropy_N: torch.Tensor | None = None
    ) -> tuple[PackedBatch, dict[str, float]]:
        """Return the batch with advantages, prox, weights and vetoed rows, and metrics of this rank's share.

        Args:
            batch: Already masked for age.
            prox_N: Log-probs at the start of the step; None if `needs_prox` is false.
            entropy_N: Entropies of the same pass, for the log.
        """
        rows = rows_of(batch)
        metrics: dict[str, float] = _lag_metrics(batch)
        advantages_R = self.advantage(batch.rewards_R, batch.group_R)
        batch = dataclasses.replace(batch, advantages_N=rows.spread(advantages_R))
        if self.correction.is_bypass:
            return batch, metrics
        assert prox_N is not None, "a decoupled objective needs prox"
        delta_N, before_N = prox_N - batch.behaviour_N, batch.loss_mask_N
        batch = dataclasses.replace(batch, prox_N=prox_N)
        metrics |= _measure_correction(prox_N, batch.behaviour_N, before_N, rows, self.correction)
        if entropy_N is not None:
            metrics["actor/entropy"] = float(masked_mean(entropy_N, before_N))
        batch = batch.with_mask(veto_rows(delta_N, before_N, rows, self.veto))
        vetoed = before_N.sum() - batch.loss_mask_N.sum()
        metrics["rollout_corr/vetoed_share"] = float(vetoed / before_N.sum().clamp(min=1))
        if self.correction.level is not None:
            weights_N = importance_weights(delta_N, batch.loss_mask_N, rows, self.correction)
            batch = dataclasses.replace(batch, weights_N=weights_N)
        return batch, metrics

    def loss(
        self, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, microbatch: PackedBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this microbatch's share of the minibatch loss, and metrics that sum to the minibatch's.

        Raises:
            LedgerError: A token that would be trained is over `max_lag`.
        """
        microbatch.check_lag(self.max_lag)
        rows, mask_N, totals = rows_of(microbatch), microbatch.loss_mask_N, microbatch.totals
        assert microbatch.advantages_N is not None, "prepare must run before the loss"
        old_N, weights_N = microbatch.prox_N, microbatch.weights_N
        if self.correction.is_bypass:
            old_N = microbatch.behaviour_N
            delta_N = (logprobs_N - old_N).detach()
            mask_N = veto_rows(delta_N, mask_N, rows, self.veto)
            if self.correction.level is not None:
                weights_N = importance_weights(delta_N, mask_N, rows, self.correction)
        assert old_N is not None, "prepare must run before the loss"
        tokens = self.policy_loss(
            LossInput(logprobs_N, old_N, microbatch.advantages_N, mask_N, rows, self.clip)
        )
        loss = aggregate(
            tokens.loss_N if weights_N is None else tokens.loss_N * weights_N,
            mask_N,
            rows,
            self.aggregation,
            num_tokens=totals.num_tokens,
            num_rows=totals.num_rows,
            counted_N=microbatch.counted_N,
            loss_scale=self.loss_scale,
        )
        num_trained = max(totals.num_trained, 1.0)
        metrics = {
            name: masked(value_N, mask_N).sum() / num_trained for name, value_N in tokens.metrics.items()
        }
        return loss, metrics | {"actor/pg_loss": loss.detach()}


def make_objective(section: AlgorithmSection, *, max_lag: int, max_response_tokens: int) -> Objective:
    """Return the objective that the configuration names.

    Args:
        section: The algorithm section.
        max_lag: The staleness bound.
        max_response_tokens: The constant length by which seq-mean-token-sum-norm divides.

    Raises:
        ConfigError: An advantage, loss or correction is not known.
    """
    correction = resolve(section.correction, make_corrections(section.is_threshold), "algorithm.correction")
    weighs_current_policy = correction.is_bypass and correction.level is not None
    policy_loss = resolve(section.loss, POLICY_LOSSES, "algorithm.loss")
    return Objective(
        advantage=resolve(section.advantage, ADVANTAGES, "algorithm.advantage"),
        # Weights from the current policy already hold the ratio: a clipped one would count it twice.
        policy_loss=reinforce if weighs_current_policy else policy_loss,
        correction=correction,
        clip=Clip(section.clip[0], section.clip[1], section.dual_clip),
        aggregation=section.aggregation,
        loss_scale=float(max_response_tokens),
        veto=section.veto,
        max_lag=max_lag,
    )


def constant_tickets(batch: PackedBatch) -> tuple[int, ...]:
    """Return the tickets of groups whose rewards are all equal: their gradient is exactly 0."""
    groups = set(batch.group_R[is_constant(batch.rewards_R, batch.group_R)].tolist())
    return tuple(ticket for group, ticket in enumerate(batch.tickets_G) if group in groups)


def rows_of(batch: PackedBatch) -> Rows:
    """Return the rows of a packed batch."""
    return Rows(batch.row_N, batch.num_rows)


def _lag_metrics(batch: PackedBatch) -> dict[str, float]:
    lag_N = batch.lag_N.float()
    num_counted = float(batch.counted_N.sum())
    return {
        "staleness/lag_max_trained": max(0.0, float((lag_N * batch.loss_mask_N).max()))
        if batch.num_rows
        else 0.0,
        "staleness/lag_mean": float(masked_mean(lag_N, batch.loss_mask_N)),
        "staleness/masked_share": 1 - float(batch.loss_mask_N.sum()) / num_counted if num_counted else 0.0,
    }


def _measure_correction(
    prox_N: torch.Tensor, behaviour_N: torch.Tensor, mask_N: torch.Tensor, rows: Rows, correction: Correction
) -> dict[str, float]:
    is_empty = not mask_N.any()
    if is_empty:  # the same names on every rank, values without weight
        prox_N, behaviour_N, mask_N = torch.zeros(1), torch.zeros(1), torch.ones(1)
        rows = Rows(torch.zeros(1, dtype=torch.long), 1)
    metrics = diagnostics.off_policy_metrics(prox_N, behaviour_N, mask_N, rows)
    # Without weights of its own a run still logs what truncated token weights would look like.
    measured = correction if correction.level is not None else Correction(level="token")
    metrics |= diagnostics.importance_metrics(prox_N - behaviour_N, mask_N, rows, measured)
    prefixed = {f"rollout_corr/{name}": value for name, value in metrics.items()}
    prefixed["rollout_corr/empty_batch"] = float(is_empty)
    probabilities = diagnostics.probability_metrics(prox_N, behaviour_N, mask_N)
    return prefixed | {f"training/{name}": value for name, value in probabilities.items()}
