"""The objective of a run: advantage, correction, loss and aggregation put together.

Owns the order in which they apply. Per step: `prepare` once on the whole batch, then `loss` for every
microbatch (and `value_loss` for a critic's), then `update_controllers` with the step's metrics.
Invariant S3: no token over `max_lag` enters a loss; it is asserted here once more.

Shapes: N packed positions, R rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from asyncrl.core.config.tree import AlgorithmSection, KlSection
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.core.staleness import UNLOADED
from asyncrl.core.variants import estimators_needing
from learner.algorithms.advantage import ADVANTAGES, AdvantageFn, AdvantageInput
from learner.algorithms.advantage.terms import on_one_rank
from learner.algorithms.aggregation import aggregate, aggregate_rows
from learner.algorithms.centre import Centre, make_centre, rows_of
from learner.algorithms.kl import AdaptiveKl, FixedKl, KlController, kl_penalty, measure_penalty
from learner.algorithms.losses import POLICY_LOSSES, Clip, LossInput, PolicyLossFn, TokenLoss
from learner.algorithms.losses.clipped import reinforce
from learner.algorithms.losses.terms import value_loss
from learner.algorithms.presets import find_correction
from learner.algorithms.registry import resolve
from learner.algorithms.rows import Rows, Sum, masked, masked_mean, sum_episodes
from learner.algorithms.validation import check_section, describe_section
from learner.batching.batch import PackedBatch

Tensors = dict[str, torch.Tensor]
MOST_LAG_TOLD = 32
"""Of the histogram of lags; its last bar holds all that is older."""


@dataclass(frozen=True)
class KlTerm:
    """KL to the reference policy, and who owns its coefficient."""

    estimator: str
    is_in_reward: bool
    controller: KlController


@dataclass(frozen=True)
class Objective:
    """Objective that training minimises. Make it with `make_objective`."""

    section: AlgorithmSection
    advantage: AdvantageFn
    policy_loss: PolicyLossFn
    centre: Centre
    kl: KlTerm | None
    loss_scale: float
    max_lag: int

    @property
    def needs_prox(self) -> bool:
        """Whether `prepare` wants log-probs under the weights at the start of the step."""
        return self.centre.needs_prox

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` wants `reference_N` on the batch."""
        return self.kl is not None

    @property
    def needs_values(self) -> bool:
        """Whether `prepare` wants a critic's `values_N` on the batch, and sets `returns_N`."""
        return self._needs("values")

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Whether `prepare` wants `sum_pi_squared_N` on the batch, of the pass that gives prox."""
        return self._needs("sum_pi_squared")

    @property
    def needs_greedy(self) -> bool:
        """Whether `prepare` wants `baseline_R` on the batch."""
        return self._needs("greedy")

    def _needs(self, what: str) -> bool:
        return self.section.advantage in estimators_needing(what)

    def prepare(
        self,
        batch: PackedBatch,
        prox_N: torch.Tensor | None,
        entropy_N: torch.Tensor | None = None,
        over_ranks: Sum = on_one_rank,
    ) -> tuple[PackedBatch, dict[str, float]]:
        """Return the batch with advantages, prox, weights and rejections, and metrics of this rank's share.

        Args:
            batch: Already masked for age; with `values_N`, `reference_N`, `sum_pi_squared_N` as needed.
            prox_N: Log-probs at the start of the step; None if `needs_prox` is false.
            entropy_N: Entropies of the same pass, for the log.
            over_ranks: Sums totals over data-parallel ranks, where something is whitened or normalized.

        Raises:
            ConfigError: The batch lacks what the objective needs of a model.
            DataError: A group came without the greedy answer that the advantage compares with.
        """
        self._check_fields(batch)
        rows = rows_of(batch)
        metrics: dict[str, float] = _lag_metrics(batch, self.max_lag)
        if self.kl is not None:
            metrics["actor/kl_coef"] = self.kl.controller.value
        if self.needs_prox and entropy_N is not None:
            metrics["actor/entropy"] = float(masked_mean(entropy_N, batch.loss_mask_N))
        batch, corrected = self.centre.prepare(batch, prox_N, over_ranks)
        metrics |= corrected
        # After the correction: an optimal baseline weighs tokens as the loss will.
        batch, penalised = self._set_advantages(batch, rows, over_ranks)
        return batch, metrics | penalised

    def loss(
        self, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, microbatch: PackedBatch
    ) -> tuple[torch.Tensor, Tensors]:
        """Return this microbatch's share of the minibatch loss, and metrics that sum to the minibatch's.

        Raises:
            LedgerError: A token that would be trained is over `max_lag`.
        """
        microbatch.check_lag(self.max_lag)
        assert microbatch.advantages_N is not None, "prepare must run before the loss"
        corrected = self.centre.correct(logprobs_N, microbatch)
        mask_N, weights_N = corrected.mask_N, corrected.weights_N
        rows = rows_of(microbatch)
        tokens = self.policy_loss(
            LossInput(
                logprobs_N,
                corrected.old_N,
                microbatch.advantages_N,
                mask_N,
                rows,
                Clip(*self.section.clip, self.section.dual_clip),
                weights_N=weights_N,
                behaviour_N=microbatch.behaviour_N,
                seed=microbatch.step,
            )
        )
        policy_loss = self._aggregate(tokens, weights_N, mask_N, microbatch)
        unsampled = {"actor/unsampled_share": (microbatch.version_N == UNLOADED).float()}
        seen = dataclasses.replace(tokens, metrics=tokens.metrics | unsampled)
        metrics = _mean_metrics(seen, mask_N, microbatch) | {"actor/pg_loss": policy_loss.detach()}
        terms_loss, terms = self._regularise(logprobs_N, entropy_N, mask_N, microbatch)
        loss = policy_loss + terms_loss
        return loss, metrics | terms | {"actor/loss": loss.detach()}

    def value_loss(self, values_N: torch.Tensor, microbatch: PackedBatch) -> tuple[torch.Tensor, Tensors]:
        """Return this microbatch's share of the critic's loss, and metrics that sum to the minibatch's."""
        assert microbatch.values_N is not None and microbatch.returns_N is not None, "prepare comes first"
        mask_N = microbatch.loss_mask_N
        tokens = value_loss(values_N, microbatch.values_N, microbatch.returns_N, self.section.value_clip)
        loss = self._aggregate(tokens, None, mask_N, microbatch)
        seen = TokenLoss(values_N, tokens.metrics | {"critic/vpred_mean": values_N.detach()})
        found = loss.detach()
        return loss, _mean_metrics(seen, mask_N, microbatch) | {"critic/vf_loss": found, "critic/loss": found}

    def update_controllers(self, metrics: Mapping[str, float], num_rows: float) -> None:
        """Let the KL controller see the step that has just been trained: its metrics over all ranks."""
        if self.kl is None:
            return
        kl = metrics.get("actor/reward_kl_penalty" if self.kl.is_in_reward else "actor/kl_loss")
        if kl is not None:
            self.kl.controller.update(kl, num_rows)

    def fall_back_kl(self) -> bool:
        """Use coefficient 0 from now on, which no controller leaves; return False without a KL term."""
        if self.kl is None:
            return False
        self.kl.controller.turn_off()
        return True

    def read_controllers(self) -> dict[str, float]:
        """Return what a checkpoint must keep."""
        return {} if self.kl is None else self.kl.controller.state()

    def restore_controllers(self, state: Mapping[str, float]) -> None:
        """Take what `read_controllers` gave."""
        if self.kl is not None:
            self.kl.controller.restore(state)

    def _check_fields(self, batch: PackedBatch) -> None:
        if self.needs_values and batch.values_N is None:
            raise ConfigError(
                f"algorithm.advantage: {self.section.advantage} needs the values of a critic",
                hint="Choose an advantage without a critic, such as grpo",
            )
        if self.needs_reference and batch.reference_N is None:
            raise ConfigError(
                "algorithm.kl needs the log-probs of a reference policy", hint="Set algorithm.kl.coef: 0"
            )
        if self.needs_greedy:
            _check_baselines(batch)

    def _set_advantages(
        self, batch: PackedBatch, rows: Rows, over_ranks: Sum
    ) -> tuple[PackedBatch, dict[str, float]]:
        metrics: dict[str, float] = {}
        # Tokens masked by age still belong to the trajectory: returns run through them.
        counted_N = batch.counted_N
        scores_R = batch.rewards_R
        is_last_N = (rows.remaining(counted_N) == 1) & (counted_N != 0)
        rewards_N = torch.where(is_last_N, rows.spread(scores_R), 0.0)
        if self.kl is not None and self.kl.is_in_reward:
            assert batch.reference_N is not None, "checked on entry"
            policy_N = batch.behaviour_N if batch.prox_N is None else batch.prox_N
            penalty = measure_penalty(policy_N, batch.reference_N, counted_N, rows, self.kl.estimator)
            coefficient = self.kl.controller.value
            if coefficient:  # 0 turns it off whatever the KL is
                rewards_N = rewards_N - coefficient * penalty.kl_N
                kl_R = sum_episodes(rows.sum(penalty.kl_N, counted_N), batch.episode_R)
                scores_R = scores_R - coefficient * kl_R
            metrics["actor/reward_kl_penalty"] = penalty.mean
            metrics["actor/reward_kl_penalty_coeff"] = coefficient
        found = self.advantage(
            AdvantageInput(
                rewards_N,
                scores_R,
                counted_N,
                rows,
                batch.group_R,
                batch.episode_R,
                gamma=self.section.gamma,
                lam=self.section.lam,
                values_N=batch.values_N,
                prox_N=batch.prox_N,
                behaviour_N=batch.behaviour_N,
                weights_N=batch.weights_N,
                sum_pi_squared_N=batch.sum_pi_squared_N,
                greedy_R=batch.baseline_R,
                verl_compat=self.section.verl_compat,
                over_ranks=over_ranks,
            )
        )
        returns_N = found.returns_N if self.needs_values else None
        batch = dataclasses.replace(batch, rewards_R=scores_R, advantages_N=found.advantages_N)
        return dataclasses.replace(batch, returns_N=returns_N), metrics

    def _aggregate(
        self,
        tokens: TokenLoss,
        weights_N: torch.Tensor | None,
        mask_N: torch.Tensor,
        microbatch: PackedBatch,
    ) -> torch.Tensor:
        totals = microbatch.totals
        if tokens.loss_R is not None:
            return aggregate_rows(tokens.loss_R * microbatch.share_R, totals.num_rows)
        is_compat = self.section.verl_compat
        return aggregate(
            tokens.loss_N if weights_N is None else tokens.loss_N * weights_N,
            mask_N,
            rows_of(microbatch),
            tokens.aggregation or self.section.aggregation,
            num_tokens=totals.num_trained if is_compat else totals.num_tokens,
            num_rows=totals.num_rows,
            counted_N=mask_N if is_compat else microbatch.counted_N,
            loss_scale=self.loss_scale,
            share_R=microbatch.share_R,
        )

    def _regularise(
        self,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        mask_N: torch.Tensor,
        microbatch: PackedBatch,
    ) -> tuple[torch.Tensor, Tensors]:
        """Return the entropy bonus and the KL loss, and their metrics."""
        loss, metrics = logprobs_N.new_zeros(()), {}
        if self.section.entropy_coeff:
            entropy = self._aggregate(TokenLoss(entropy_N), None, mask_N, microbatch)
            loss = loss - self.section.entropy_coeff * entropy
            metrics["actor/entropy_loss"] = entropy.detach()
        if self.kl is not None and not self.kl.is_in_reward:
            assert microbatch.reference_N is not None, "checked in prepare"
            kl_N = kl_penalty(logprobs_N, microbatch.reference_N, self.kl.estimator)
            kl = self._aggregate(TokenLoss(kl_N), None, mask_N, microbatch)
            if self.kl.controller.value:  # 0 turns it off whatever the KL is
                loss = loss + self.kl.controller.value * kl
            metrics["actor/kl_loss"] = kl.detach()
        return loss, metrics


def make_objective(section: AlgorithmSection, *, max_lag: int, max_response_tokens: int) -> Objective:
    """Return the objective that the configuration names.

    Args:
        section: The algorithm section.
        max_lag: The staleness bound.
        max_response_tokens: The constant length by which seq-mean-token-sum-norm divides.

    Raises:
        ConfigError: An advantage, loss or correction is not known, or two settings do not go together.
    """
    correction = find_correction(section)
    policy_loss = resolve(section.loss, POLICY_LOSSES, "algorithm.loss")
    advantage = resolve(section.advantage, ADVANTAGES, "algorithm.advantage")
    check_section(section, correction)
    if correction.is_policy_gradient:
        # Weights from the current policy already hold the ratio: a clipped one would count it twice.
        policy_loss = reinforce
    return Objective(
        section=section,
        advantage=advantage,
        policy_loss=policy_loss,
        centre=make_centre(section.prox, correction, section.veto),
        kl=_make_kl(section.kl),
        loss_scale=float(max_response_tokens),
        max_lag=max_lag,
    )


def describe(section: AlgorithmSection) -> str:
    """Return in words which correction is active and what is minimised. Raises ConfigError."""
    return describe_section(section, find_correction(section))


def _check_baselines(batch: PackedBatch) -> None:
    none_R = torch.full_like(batch.rewards_R, math.nan)
    baseline_R = none_R if batch.baseline_R is None else batch.baseline_R
    groups = sorted(set(batch.group_R[baseline_R.isnan()].tolist()))
    lacking = [batch.tickets_G[group] for group in groups]
    if lacking:
        raise DataError(
            f"step {batch.step}: {len(lacking)} groups, the first of them ticket {lacking[0]}, "
            "lack the reward of a greedy answer",
            hint="They were made under another algorithm.advantage: give this run a name of its own",
        )


def _make_kl(section: KlSection) -> KlTerm | None:
    if not section.coef:
        return None
    controller: KlController = FixedKl(section.coef)
    if section.adaptive is not None:
        controller = AdaptiveKl(section.coef, section.adaptive.target, section.adaptive.horizon)
    return KlTerm(section.estimator, section.where == "reward", controller)


def _mean_metrics(tokens: TokenLoss, mask_N: torch.Tensor, microbatch: PackedBatch) -> Tensors:
    num_trained = max(microbatch.totals.num_trained, 1.0)
    return {name: masked(value_N, mask_N).sum() / num_trained for name, value_N in tokens.metrics.items()}


def _lag_metrics(batch: PackedBatch, max_lag: int) -> dict[str, float]:
    lag_N = batch.lag_N.float()
    num_bars = min(max_lag, MOST_LAG_TOLD) + 1
    trained = batch.lag_N[batch.loss_mask_N.bool()].clamp(0, num_bars - 1).long()
    shares = torch.bincount(trained, minlength=num_bars) / len(trained)  # NaN of no token
    return {
        **{f"staleness/lag_share/{lag}": float(share) for lag, share in enumerate(shares)},
        "staleness/lag_max_trained": max(0.0, float((lag_N * batch.loss_mask_N).max()))
        if batch.num_rows
        else 0.0,
        "staleness/lag_mean": float(masked_mean(lag_N, batch.loss_mask_N)),
    }
