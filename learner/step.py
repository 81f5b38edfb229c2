"""One learner step, from reserved tickets to updated weights: the data flow of training.

    fetch -> pack -> mask what is over age -> prox log-probs, reference, values -> advantages -> updates

Every rank runs this on its own share of the batch. Invariant: what enters a loss was within
`max_lag` when it was packed, and the loss asserts it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learner.algorithms.objective import Objective
from learner.algorithms.rows import Sum
from learner.backend import LearnerBackend, Models
from learner.batching.balance import measure_balance
from learner.batching.batch import PackedBatch, assign_shards, build_batch, plan_minibatches
from learner.intake import Intake
from learner.orders import Train
from learner.report import (
    Stopwatch,
    describe_baselines,
    describe_batch,
    describe_probabilities,
    describe_rewards,
    describe_targets,
    merge_updates,
)


@dataclass(frozen=True)
class StepResult:
    """What one rank's step gave.

    Attributes:
        metrics: Of this rank's share, and `weight` to average them with.
        num_trained: Tokens that entered the loss.
        num_masked: Sampled tokens that were over age.
        stale_tickets: Groups without a trainable token.
    """

    metrics: dict[str, float]
    weight: float
    num_trained: int
    num_masked: int
    stale_tickets: list[int]


def train_step(
    order: Train,
    intake: Intake,
    models: Models,
    objective: Objective,
    num_minibatches: int,
    watch: Stopwatch,
    max_prompt_tokens: int,
) -> StepResult:
    """Train this rank's share of one reserved batch; `max_prompt_tokens` is the limit on prompts."""
    plan = plan_minibatches(order.tickets, num_minibatches)
    num_tokens_of = dict(zip(order.tickets, order.num_tokens, strict=True))
    shards = assign_shards(num_tokens_of, plan, models.policy.dp_size)
    mine = shards[models.policy.dp_rank]
    with watch.time("fetch"):
        groups = intake.fetch(order.token, mine)
        whole = build_batch(groups, order.step, dict(order.versions))
    metrics = describe_batch(groups, whole, max_prompt_tokens) | _measure_shards(order, shards)
    if objective.needs_greedy:
        metrics |= describe_baselines(whole)
    num_sampled = int(whole.loss_mask_N.sum())
    batch = whole.mask_over_age(objective.max_lag)
    num_trained = int(batch.loss_mask_N.sum())
    counts = zip(batch.tickets_G, batch.trainable_tokens_G(), strict=True)
    stale = [ticket for ticket, num_trainable in counts if num_trainable == 0]
    batch = batch.select_groups(set(mine) - set(stale))
    in_bound_N = batch.loss_mask_N
    batch, prepared = _prepare(batch, models, objective, watch)
    metrics |= describe_rewards(whole, batch) | describe_probabilities(batch, in_bound_N) | prepared
    metrics |= describe_targets(batch) | _update(batch, plan, models, objective, watch)
    return StepResult(metrics, batch.totals.num_tokens, num_trained, num_sampled - num_trained, stale)


def _prepare(
    batch: PackedBatch, models: Models, objective: Objective, watch: Stopwatch
) -> tuple[PackedBatch, dict[str, float]]:
    """Let the models say what the objective needs to know of the batch, and make its targets."""
    prox_N = entropy_N = None
    if objective.needs_prox:
        with watch.time("old_log_prob"):
            batch, prox_N, entropy_N = _look_back(batch, models.policy, objective)
    if models.reference is not None:
        with watch.time("ref"):
            batch = dataclasses.replace(batch, reference_N=models.reference.logprobs(batch)[0])
    if models.critic is not None:
        with watch.time("values"):
            batch = dataclasses.replace(batch, values_N=models.critic.values(batch))
    with watch.time("adv"):
        return objective.prepare(batch, prox_N, entropy_N, _sum_over_shares(models.policy))


def _look_back(
    batch: PackedBatch, policy: LearnerBackend, objective: Objective
) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """Return the batch, prox log-probs and entropies under the weights at the start of the step."""
    if not objective.needs_sum_pi_squared:
        return batch, *policy.logprobs(batch)
    prox_N, entropy_N, squares_N = policy.logprobs_and_squares(batch)
    return dataclasses.replace(batch, sum_pi_squared_N=squares_N), prox_N, entropy_N


def _update(
    batch: PackedBatch,
    plan: Sequence[Sequence[int]],
    models: Models,
    objective: Objective,
    watch: Stopwatch,
) -> dict[str, float]:
    """Do the optimizer updates of the step, the critic's first; return their metrics."""
    minibatches = [batch.select_groups(tickets) for tickets in plan]
    metrics: dict[str, float] = {}
    if models.critic is not None:
        with watch.time("update_critic"):
            metrics |= merge_updates(
                [models.critic.update(minibatch, objective.value_loss) for minibatch in minibatches]
            )
    with watch.time("update_actor"):
        updates = [models.policy.update(minibatch, objective.loss) for minibatch in minibatches]
    return metrics | merge_updates(updates) | {"actor/num_updates": float(len(updates))}


def _sum_over_shares(backend: LearnerBackend) -> Sum:
    """Return what sums a tensor over data-parallel ranks. Collective."""

    def add(totals: torch.Tensor) -> torch.Tensor:
        if backend.dp_size == 1:
            return totals
        values = {str(index): float(value) for index, value in enumerate(totals.flatten())}
        means = backend.reduce(values, weight=1.0)
        return totals.new_tensor([means[name] for name in values]).view_as(totals) * backend.dp_size

    return add


def _measure_shards(order: Train, shards: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return `global_seqlen/*` of the step, the same on every rank."""
    index_of = {ticket: index for index, ticket in enumerate(order.tickets)}
    return measure_balance(order.num_tokens, [[index_of[ticket] for ticket in shard] for shard in shards])
