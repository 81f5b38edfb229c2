"""One learner step, from reserved tickets to updated weights: the data flow of training.

    fetch -> pack -> mask what is over age -> prox log-probs -> advantages, weights -> updates

Every rank runs this on its own share of the batch. Invariant: what enters a loss was within
`max_lag` when it was packed, and the loss asserts it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from learner.algorithms.objective import Objective
from learner.backend import LearnerBackend
from learner.batch import assign_shards, build_batch, plan_minibatches
from learner.intake import Intake
from learner.orders import Train
from learner.report import Stopwatch, describe_batch, merge_updates


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
    backend: LearnerBackend,
    objective: Objective,
    num_minibatches: int,
    watch: Stopwatch,
) -> StepResult:
    """Train this rank's share of one reserved batch."""
    plan = plan_minibatches(order.tickets, num_minibatches)
    num_tokens_of = dict(zip(order.tickets, order.num_tokens, strict=True))
    mine = assign_shards(num_tokens_of, plan, backend.dp_size)[backend.dp_rank]
    with watch.time("fetch"):
        groups = intake.fetch(order.token, mine)
        batch = build_batch(groups, order.step, dict(order.versions))
    metrics = describe_batch(groups, batch)
    num_sampled = int(batch.loss_mask_N.sum())
    batch = batch.mask_over_age(objective.max_lag)
    num_trained = int(batch.loss_mask_N.sum())
    counts = zip(batch.tickets_G, batch.trainable_tokens_G(), strict=True)
    stale = [ticket for ticket, num_trainable in counts if num_trainable == 0]
    batch = batch.select_groups(set(mine) - set(stale))
    with watch.time("old_log_prob"):
        prox = backend.logprobs(batch) if objective.needs_prox else (None, None)
        batch, prepared = objective.prepare(batch, *prox)
    with watch.time("update_actor"):
        updates = [backend.update(batch.select_groups(tickets), objective.loss) for tickets in plan]
    metrics |= prepared | merge_updates(updates)
    return StepResult(metrics, batch.totals.num_tokens, num_trained, num_sampled - num_trained, stale)
