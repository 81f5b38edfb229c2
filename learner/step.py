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

from asyncrl.core.experience import Group
from learner.algorithms.objective import Objective
from learner.algorithms.rows import Sum
from learner.backend import LearnerBackend, Models
from learner.batch_fetcher import Source
from learner.batching.balance import measure_balance
from learner.batching.batch import PackedBatch, assign_shards, build_batch, plan_minibatches
from learner.batching.parts import make_empty
from learner.batching.probe import choose_seen
from learner.batching.routing import forget_routes
from learner.orders import Train
from learner.report import (
    Stopwatch,
    check_update,
    describe_baselines,
    describe_batch,
    describe_engine_gap,
    describe_probabilities,
    describe_rewards,
    describe_targets,
    merge_updates,
)


@dataclass(frozen=True)
class StepResult:
    """Result of one rank's step.

    Attributes:
        metrics: Of this rank's share, and `weight` to average them with.
        num_trained: Tokens that entered the loss.
        num_masked: Sampled tokens that were over age.
        stale_tickets: Groups without a trainable token.
        seen_ids: Some of the ids in the share, for a probe.
    """

    metrics: dict[str, float]
    weight: float
    num_trained: int
    num_masked: int
    stale_tickets: list[int]
    seen_ids: list[int]


@dataclass(frozen=True)
class Share:
    """Share of a batch, or of a part of it, that one rank trains.

    Attributes:
        shards: Tickets of every data-parallel rank.
        groups: Of this rank.
        whole: The same groups packed, as they came.
        batch: Of them those with a trainable token; what is over age is masked.
        shares_prompts: Whether the policy computes once what rows of a group share.
    """

    shards: list[list[int]]
    groups: list[Group]
    whole: PackedBatch
    batch: PackedBatch
    shares_prompts: bool = False


def train_step(
    order: Train,
    fetcher: Source,
    models: Models,
    objective: Objective,
    num_minibatches: int,
    watch: Stopwatch,
    max_prompt_tokens: int,
    *,
    keeps_cache: bool = False,
) -> StepResult:
    """Train this rank's share of one reserved batch.

    Args:
        max_prompt_tokens: The limit on prompts.
        keeps_cache: Whether tokens may have been sampled over a cache of an older version.
    """
    plan = plan_minibatches(order.tickets, num_minibatches)
    share = take_share(order, plan, fetcher, models, objective, watch)
    asked = ask_models(share.batch, models, objective, watch)
    with watch.time("adv"):
        batch, prepared = objective.prepare(*asked, sum_over_shares(models.policy))
    updated = _update(batch, plan, models, objective, watch)
    with watch.time("check"):
        updated |= check_update(batch, models.policy)
    gap = describe_engine_gap(batch, share.batch.loss_mask_N, keeps_cache=keeps_cache)
    return make_result(order, share, batch, objective, max_prompt_tokens, prepared | gap | updated)


def take_share(
    order: Train,
    plan: Sequence[Sequence[int]],
    fetcher: Source,
    models: Models,
    objective: Objective,
    watch: Stopwatch,
) -> Share:
    """Fetch and pack this rank's share of the minibatches in `plan`."""
    num_tokens_of = dict(zip(order.tickets, order.num_tokens, strict=True))
    shards = assign_shards(num_tokens_of, plan, models.policy.dp_size)
    with watch.time("fetch"):
        groups = fetcher.fetch(order.token, shards[models.policy.dp_rank])
        whole = build_batch(groups, order.step, dict(order.versions)) if groups else make_empty(order.step)
    batch = whole.mask_over_age(objective.max_lag)
    counts = zip(batch.tickets_G, batch.trainable_tokens_G(), strict=True)
    kept = batch.select_groups([ticket for ticket, count in counts if count])
    return Share(shards, groups, whole, kept, models.policy.shares_prompts)


def ask_models(
    batch: PackedBatch, models: Models, objective: Objective, watch: Stopwatch
) -> tuple[PackedBatch, torch.Tensor | None, torch.Tensor | None]:
    """Compute the inputs that the objective needs; return the batch, prox and entropies.

    Recorded experts are for the policy alone: see `learner.batching.routing`.
    """
    prox_N = entropy_N = None
    if objective.needs_prox:
        with watch.time("old_log_prob"):
            batch, prox_N, entropy_N = _look_back(batch, models.policy, objective)
    if models.reference is not None:
        with watch.time("ref"):
            batch = dataclasses.replace(batch, reference_N=models.reference.logprobs(forget_routes(batch))[0])
    if models.critic is not None:
        with watch.time("values"):
            batch = dataclasses.replace(batch, values_N=models.critic.values(forget_routes(batch)))
    return batch, prox_N, entropy_N


def make_result(
    order: Train,
    share: Share,
    batch: PackedBatch,
    objective: Objective,
    max_prompt_tokens: int,
    found: dict[str, float],
) -> StepResult:
    """Return the result of a trained share.

    Args:
        batch: The share's, as the objective prepared it.
        found: Metrics of the objective and of the updates.
    """
    shares = share.shares_prompts
    metrics = describe_batch(share.groups, share.whole, max_prompt_tokens, shares_prompts=shares)
    metrics |= _measure_shards(order, share.shards)
    if objective.needs_greedy:
        metrics |= describe_baselines(share.whole)
    metrics |= describe_rewards(share.whole, batch)
    valid_N = share.batch.loss_mask_N
    metrics |= describe_probabilities(batch, valid_N) | describe_targets(batch)
    num_sampled, num_trained = (int(one.loss_mask_N.sum()) for one in (share.whole, share.batch))
    stale = sorted(set(share.whole.tickets_G) - set(share.batch.tickets_G))
    num_masked, seen = num_sampled - num_trained, choose_seen(share.whole.tokens_N)
    return StepResult(metrics | found, batch.totals.num_tokens, num_trained, num_masked, stale, seen)


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
                [models.critic.update(forget_routes(one), objective.value_loss) for one in minibatches]
            )
    with watch.time("update_actor"):
        updates = [models.policy.update(minibatch, objective.loss) for minibatch in minibatches]
    return metrics | merge_updates(updates) | {"actor/num_updates": float(len(updates))}


def sum_over_shares(backend: LearnerBackend) -> Sum:
    """Return a function that sums a tensor over data-parallel ranks. Collective."""

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
