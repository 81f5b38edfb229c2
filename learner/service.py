"""A learner rank as a service: performs the leader's orders, one after another.

consumes: orders, trajectories      waits for: the next order
unblocked by: the leader            produces: updated weights, versions, checkpoints, metric rows
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from asyncrl.clock import Clock, SystemClock
from asyncrl.config.tree import Config
from asyncrl.errors import ConfigError
from asyncrl.faults import fault_point
from asyncrl.metrics.row_log import append_row
from asyncrl.versions import PolicyVersion
from learner.algorithms.diagnostics.summary import throughput_metrics
from learner.algorithms.objective import Objective
from learner.backend import Models
from learner.batching.batch import PackedBatch
from learner.batching.probe import build_probe_batch, measure_probe
from learner.checkpoint import CheckpointStore
from learner.checkpoint.snapshot import Snapshot
from learner.checkpoint.writer import BackgroundWriter
from learner.guard.models import GuardedModels
from learner.guard.seams import KlFallback
from learner.intake import Intake
from learner.leader import Leader
from learner.orders import Adjust, Checkpoint, Finish, Order, Publish, Restore, Train, Wait
from learner.ranks import Ranks
from learner.report import (
    Efficiency,
    ProfilerWindow,
    Stopwatch,
    describe_time,
    make_efficiency,
    measure_memory,
    reduce_over_ranks,
)
from learner.step import train_step
from weight_sync.handoff import publish_together
from weight_sync.memory.together import TogetherWriter

log = logging.getLogger(__name__)

CRITIC = "critic"
"""The critic's folder in a checkpoint."""
KL_IS_OFF = "the KL controller is fixed and its coefficient 0 from here on: nothing holds the policy back"


class LearnerService:
    """Implements `asyncrl.service.Service`. `leader` is given on rank 0."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        models: Models,
        objective: Objective,
        intake: Intake,
        store: CheckpointStore,
        weights_dir: Path,
        leader: Leader | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._models = models
        self._policy, self._critic = models.policy, models.critic
        self._guarded = GuardedModels(models)
        self._objective = objective
        self._intake = intake
        self._store = store
        self._writer = BackgroundWriter(ranks.rank)
        self._weights_dir = weights_dir
        self._leader = leader
        if leader is not None:
            leader.controllers = objective.read_controllers()
        self._together = TogetherWriter(ranks)
        self._clock = clock or SystemClock()
        self._watch = Stopwatch(self._clock)
        self._window = ProfilerWindow(
            config.metrics.profile_steps, weights_dir.parent / "profile", ranks.rank
        )
        self._rows: list[dict[str, Any]] = []
        self._step = self._resumed_step = 0
        self._state = "starting"
        self._step_began = self._clock.now()

    def run(self, stop: threading.Event) -> None:
        """Perform orders until the leader finishes."""
        for order in self._orders(stop):
            self._perform(order)
        self._window.close()
        self._models.close()

    def status(self) -> dict[str, Any]:
        return {
            "state": self._state,
            "step": self._step,
            "resumed_step": self._resumed_step,
            "last_evaluation": self._leader.last_evaluation if self._leader else 0,
            "paused": self._leader is not None and self._leader.is_paused,
            "checkpointed_step": self._leader.checkpointed_step if self._leader else 0,
        }

    def command(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Do what the supervisor asks; of what it asks of the leader, the other ranks know nothing.

        `rows {after}`: the metric rows from index `after` on. `pause`: take no batch after the step in
        progress, until `unpause`. `checkpoint`: write one after it.
        """
        if name == "rows":
            return {"rows": self._rows[args["after"] :]}
        if self._leader is None or name not in ("pause", "unpause", "checkpoint"):
            raise ConfigError(f"the learner knows no command '{name}'")
        if name == "checkpoint":
            self._leader.asked_step = self._step
        else:
            self._leader.is_paused = name == "pause"
        return {"step": self._step, "paused": self._leader.is_paused}

    @cached_property
    def _efficiency(self) -> Efficiency:
        """Asked for by the leader alone: ranks that measured at once would slow one another."""
        return make_efficiency(
            Path(self._config.model.path),
            num_devices=self._ranks.world_size,
            dtype=self._config.model.dtype,
            peak_tflops=self._config.metrics.peak_tflops,
            has_inference=self._objective.needs_prox,
        )

    def _orders(self, stop: threading.Event) -> Iterator[Order]:
        if self._leader is None:
            return self._ranks.follow()
        return (self._ranks.share(order) for order in self._leader.orders(stop))

    def _perform(self, order: Order) -> None:
        match order:
            case Train():
                with self._window.step(order.step):
                    self._train(order)
            case Publish():
                self._publish(order)
            case Checkpoint():
                with self._watch.time("save_checkpoint"):
                    self._writer.begin(self._store.temporary(order.step), self._snapshots())
            case Restore():
                self._restore(order)
            case Adjust():
                self._adjust(order)
            case Finish():
                self._finish(order)
            case Wait():
                pass

    def _restore(self, order: Restore) -> None:
        with self._watch.time("restore"):
            if order.has_checkpoint:
                folder = self._store.folder(order.step)
                self._policy.load_state(folder)
                if self._critic is not None:
                    self._critic.load_state(folder / CRITIC)
            self._objective.restore_controllers(order.controllers)
        self._step, self._resumed_step = order.step, order.step
        if self._state == "starting":  # a rollback's time belongs to the step that comes after it
            self._state = "training"
            self._begin_account()

    def _begin_account(self) -> None:
        """Let the first step's time begin here."""
        self._step_began = self._clock.now()
        self._watch.read()
        if self._leader is not None:
            self._leader.waits.take()

    def _snapshots(self) -> dict[str, Callable[[], Snapshot]]:
        """Return what a checkpoint holds, by its folder in it. The reference is the model of the start."""
        if self._critic is None:
            return {"": self._policy.snapshot_state}
        return {"": self._policy.snapshot_state, CRITIC: self._critic.snapshot_state}

    def _adjust(self, order: Adjust) -> None:
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

    def _train(self, order: Train) -> None:
        self._guarded.begin_step(order.limits)
        result = train_step(
            order,
            self._intake,
            self._guarded.models,
            self._objective,
            self._config.learner.minibatches,
            self._watch,
            self._config.data.max_prompt_tokens,
        )
        fault_point("learner.trained", order.step)
        metrics = reduce_over_ranks(self._policy, result.metrics | measure_memory(), result.weight)
        num_rows = len(order.tickets) * self._config.rollout.group_size
        self._objective.update_controllers(metrics, num_rows)
        stale = self._ranks.gather(result.stale_tickets)
        refused = self._ranks.gather(self._guarded.refused_tickets)
        num_trained, num_masked, num_out_of_memory = self._ranks.add(
            [result.num_trained, result.num_masked, self._guarded.num_out_of_memory]
        )
        # The ranks that train one share together each count all of it.
        metrics["staleness/trained_tokens"] = num_trained / self._policy.num_copies
        metrics["staleness/masked_tokens"] = num_masked / self._policy.num_copies
        metrics["staleness/masked_share"] = num_masked / max(1, num_masked + num_trained)
        metrics["guard/out_of_memory"] = float(num_out_of_memory)
        self._step = order.step + 1
        if self._leader is None:
            return
        self._leader.stale_tickets, self._leader.refused_tickets = stale, refused
        self._leader.lag_max = int(metrics["staleness/lag_max_trained"])
        self._leader.controllers = self._objective.read_controllers()
        self._record(order, metrics)

    def _record(self, order: Train, metrics: dict[str, float]) -> None:
        """Add the step's row; its time runs from the end of the step before, so shares add up to it."""
        assert self._leader is not None
        now = self._clock.now()
        total_s, self._step_began = now - self._step_began, now
        num_tokens = float(sum(order.num_tokens))
        waits, stages = self._leader.waits.take(), self._watch.read()
        row = {
            "time": time.time(),
            "training/global_step": self._step,
            **metrics,
            **describe_time(stages, waits, total_s),
            **self._efficiency.describe(metrics, stages, num_tokens),
            **throughput_metrics(order.num_tokens, total_s, self._ranks.world_size),
            "perf/learner_tokens_per_s": num_tokens / total_s,
            "weights/publish_s": stages.get("timing_s/update_weights", 0.0),
            **self._leader.handoff.take_times().metrics(),
        }
        row |= self._leader.keeper.take_metrics()
        self._leader.keeper.note_metrics(self._step, row)
        self._keep(row | self._leader.judge(order.step, row, self._guarded.num_refused))

    def _keep(self, row: dict[str, Any]) -> None:
        """Hold a row for the supervisor; on disk too: it may be away for longer than this process lives."""
        try:
            is_first = float(not self._rows)
            append_row(self._weights_dir.parent, {**row, "training/is_first_of_life": is_first})
        except OSError as error:
            log.warning("the row of step %d was not written down: %s", self._step, error)
        self._rows.append(row)

    @cached_property
    def _probe_batch(self) -> PackedBatch:
        longest = self._config.data.max_prompt_tokens + self._config.rollout.max_tokens
        return build_probe_batch(Path(self._config.model.path), self._config.run.seed, longest)

    def _publish(self, order: Publish) -> None:
        probe = None
        if order.has_probe:
            with self._watch.time("probe"):
                probe = measure_probe(self._policy, self._probe_batch, self._config.rollout.temperature)
        with self._watch.time("update_weights"):
            handoff = self._leader.handoff if self._leader is not None else None
            version = PolicyVersion(order.number, order.step)
            publish_together(handoff, self._together, order.path, version, self._policy, probe)

    def _finish(self, order: Finish) -> None:
        self._state = "finishing"
        if order.is_complete:
            self._policy.save_hf(self._weights_dir)
            if self._ranks.is_leader:
                log.info("the weights of step %d are in %s", self._step, self._weights_dir)
