"""Operations on one rank's models: load a checkpoint, change the learning rate, train a batch.

The service does this on the orders of a live run, a replay on those that a run recorded; both go through
here, so that a replay computes what the run computed. Every method is collective. Must never talk to
another service but through the fetcher.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core.config.tree import Config
from asyncrl.core.runtime.faults import fault_point
from learner.algorithms.objective import Objective
from learner.backend import Models
from learner.batch_fetcher import FittingGroups, Source
from learner.guard.hooks import KlFallback
from learner.guard.memory import GuardedModels
from learner.orders import Adjust, Train, split_parts
from learner.ranks import Ranks
from learner.report import Stopwatch, measure_memory, reduce_over_ranks
from learner.step import StepResult, train_step
from learner.stream import StreamedStep

log = logging.getLogger(__name__)

CRITIC = "critic"
"""The critic's folder in a checkpoint."""
KL_IS_OFF = "the KL controller is fixed and its coefficient 0 from here on: no KL penalty is applied"


@dataclass(frozen=True)
class Trained:
    """Result of a step, the same on every rank.

    Attributes:
        metrics: Of the whole step, without times.
        stale_tickets: Groups without a trainable token.
        oversized_tickets: Groups with a row longer than a microbatch.
        refused_tickets: Groups whose updates the guard refused for every model.
        num_refused: Updates that the guard refused: they were beyond the limits of the order.
        order: For the whole batch, with its parts if it came in any.
        seen_ids: Vocabulary ids of this rank's share of the batch: they differ by rank.
    """

    metrics: dict[str, float]
    stale_tickets: list[int]
    oversized_tickets: list[int]
    refused_tickets: list[int]
    num_refused: int
    order: Train
    seen_ids: list[int]


class Trainer:
    """Trains the `models` of one rank. `adjustment` is the last one that was made."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        models: Models,
        objective: Objective,
        fetcher: Source,
        watch: Stopwatch,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._policy, self._critic = models.policy, models.critic
        self._guarded = GuardedModels(models)
        self._objective = objective
        self._fetcher = FittingGroups(fetcher, config.learner.max_tokens_per_microbatch)
        self._watch = watch
        self._streamed: StreamedStep | None = None
        self.adjustment = Adjust(lr_scale=1.0, is_kl_off=False)

    def restore(self, folder: Path | None, controllers: Mapping[str, float]) -> None:
        """Load the checkpoint in `folder`, if there is one, and the state of the objective's controllers.

        Raises:
            CheckpointError: The folder holds another model's state, or is incomplete.
        """
        if folder is not None:
            self._policy.load_state(folder)
            if self._critic is not None:
                self._critic.load_state(folder / CRITIC)
                self._critic.set_lr(self._config.critic.lr)
            # A resume may have changed the rate. The guard's factor is applied by `adjust`.
            self._policy.set_lr(self._config.learner.lr)
        self._objective.restore_controllers(controllers)

    def adjust(self, order: Adjust) -> None:
        """Apply the guard's learning-rate factor and its KL switch to all later steps."""
        self.adjustment = order
        self._policy.set_lr(self._config.learner.lr * order.lr_scale)
        if self._critic is not None:
            self._critic.set_lr(self._config.critic.lr * order.lr_scale)
        if not order.is_kl_off:
            return
        has_kl = isinstance(self._objective, KlFallback) and self._objective.fall_back_kl()
        if self._ranks.is_leader:
            log.warning(
                "guard: %s", KL_IS_OFF if has_kl else "the objective has no KL term, nothing was turned off"
            )

    def add_part(self, order: Train) -> None:
        """Compute a part of a batch that is not its last: that one goes to `train`."""
        if order.is_first:
            self._guarded.begin_step(order.limits)
            self._streamed = StreamedStep(
                self._fetcher,
                self._guarded.models,
                self._objective,
                self._watch,
                self._config.data.max_prompt_tokens,
                keeps_cache=self._keeps_cache,
            )
        assert self._streamed is not None, "a step begins with its first part"
        self._streamed.add(order)
        fault_point("learner.streamed", order.step)

    def train(self, order: Train) -> Trained:
        """Train this rank's share of a batch.

        Args:
            order: Of a whole batch, of the last part of one, or (replay) of a whole one that lists its parts.
        """
        if order.parts:
            *parts, order = split_parts(order)
            for part in parts:
                self.add_part(part)
        order, result = self._train_whole(order) if order.is_first else self._end_step(order)
        fault_point("learner.trained", order.step)
        metrics = reduce_over_ranks(self._policy, result.metrics | measure_memory(), result.weight)
        num_rows = len(order.tickets) * self._config.rollout.group_size
        self._objective.update_controllers(metrics, num_rows)
        stale = self._ranks.gather(result.stale_tickets)
        oversized = self._ranks.gather(self._fetcher.take_left_out())
        refused = self._ranks.gather(self._guarded.refused_tickets)
        num_trained, num_masked, num_out_of_memory = self._ranks.add(
            [result.num_trained, result.num_masked, self._guarded.num_out_of_memory]
        )
        # The ranks that train one share together each count all of it.
        metrics["staleness/trained_tokens"] = num_trained / self._policy.num_copies
        metrics["staleness/masked_tokens"] = num_masked / self._policy.num_copies
        metrics["staleness/masked_share"] = num_masked / max(1, num_masked + num_trained)
        metrics["guard/out_of_memory"] = float(num_out_of_memory)
        dropped = (stale, oversized, refused)
        return Trained(metrics, *dropped, self._guarded.num_refused, order, result.seen_ids)

    @property
    def _keeps_cache(self) -> bool:
        return self._config.rollout.kv_cache == "keep"

    def _train_whole(self, order: Train) -> tuple[Train, StepResult]:
        self._guarded.begin_step(order.limits)
        result = train_step(
            order,
            self._fetcher,
            self._guarded.models,
            self._objective,
            self._config.learner.minibatches,
            self._watch,
            self._config.data.max_prompt_tokens,
            keeps_cache=self._keeps_cache,
        )
        return order, result

    def _end_step(self, order: Train) -> tuple[Train, StepResult]:
        """Compute the last part and update."""
        streamed, self._streamed = self._streamed, None
        assert streamed is not None, "a step begins with its first part"
        streamed.add(order)
        return streamed.finish()
