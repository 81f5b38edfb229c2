"""A learner rank as a service: performs the leader's orders, one after another.

consumes: orders, trajectories      waits for: the next order
unblocked by: the leader            produces: updated weights, versions, checkpoints, metric rows
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.tree import Config
from asyncrl.errors import ConfigError
from asyncrl.faults import fault_point
from asyncrl.versions import PolicyVersion
from learner.algorithms.objective import Objective
from learner.backend import LearnerBackend
from learner.checkpoint import CheckpointStore
from learner.intake import Intake
from learner.leader import Leader
from learner.orders import Checkpoint, Finish, Order, Publish, Restore, Train, Wait
from learner.ranks import Ranks
from learner.report import Stopwatch
from learner.step import train_step

log = logging.getLogger(__name__)


class LearnerService:
    """Implements `asyncrl.service.Service`. `leader` is given on rank 0."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        backend: LearnerBackend,
        objective: Objective,
        intake: Intake,
        store: CheckpointStore,
        weights_dir: Path,
        leader: Leader | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._backend = backend
        self._objective = objective
        self._intake = intake
        self._store = store
        self._weights_dir = weights_dir
        self._leader = leader
        self._watch = Stopwatch()
        self._rows: list[dict[str, Any]] = []
        self._step = self._resumed_step = 0
        self._state = "starting"
        self._step_began = time.perf_counter()

    def run(self, stop: threading.Event) -> None:
        """Perform orders until the leader finishes."""
        for order in self._orders(stop):
            self._perform(order)
        self._backend.close()

    def status(self) -> dict[str, Any]:
        return {
            "state": self._state,
            "step": self._step,
            "resumed_step": self._resumed_step,
            "last_evaluation": self._leader.last_evaluation if self._leader else 0,
        }

    def command(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """`rows {after}`: the metric rows from index `after` on."""
        if name != "rows":
            raise ConfigError(f"the learner knows no command '{name}'")
        return {"rows": self._rows[args["after"] :]}

    def _orders(self, stop: threading.Event) -> Iterator[Order]:
        if self._leader is None:
            return self._ranks.follow()
        return (self._ranks.share(order) for order in self._leader.orders(stop))

    def _perform(self, order: Order) -> None:
        match order:
            case Train():
                self._train(order)
            case Publish():
                self._publish(order)
            case Checkpoint():
                with self._watch.time("save_checkpoint"):
                    self._backend.save_state(self._store.temporary(order.step))
            case Restore():
                self._restore(order)
            case Finish():
                self._finish(order)
            case Wait():
                pass

    def _restore(self, order: Restore) -> None:
        if order.step:
            self._backend.load_state(self._store.folder(order.step))
        self._step, self._resumed_step, self._state = order.step, order.step, "training"
        self._step_began = time.perf_counter()

    def _train(self, order: Train) -> None:
        minibatches = self._config.learner.minibatches
        result = train_step(order, self._intake, self._backend, self._objective, minibatches, self._watch)
        fault_point("learner.trained", order.step)
        metrics = self._backend.reduce(result.metrics, result.weight)
        stale = self._ranks.gather(result.stale_tickets)
        num_trained, num_masked = self._ranks.add([result.num_trained, result.num_masked])
        # Tensor-parallel ranks hold copies of the same share.
        metrics["staleness/trained_tokens"] = num_trained / self._config.learner.tp
        metrics["staleness/masked_tokens"] = num_masked / self._config.learner.tp
        self._step = order.step + 1
        if self._leader is None:
            return
        self._leader.stale_tickets = stale
        self._record(order, metrics)

    def _record(self, order: Train, metrics: dict[str, float]) -> None:
        """Add the step's row; its time runs from the end of the step before, so shares add up to it."""
        assert self._leader is not None
        now = time.perf_counter()
        total_s, self._step_began = now - self._step_began, now
        num_tokens = float(sum(order.num_tokens))
        waited_s = self._leader.take_wait_s()
        stages = {**self._watch.read(), "timing_s/wait": waited_s}
        self._rows.append(
            {
                "training/global_step": self._step,
                **metrics,
                **stages,
                "timing_s/other": total_s - sum(stages.values()),
                "timing_s/step": total_s,
                "perf/total_num_tokens": num_tokens,
                "perf/time_per_step": total_s,
                "perf/throughput": num_tokens / (total_s * self._ranks.world_size),
                "perf/learner_tokens_per_s": num_tokens / total_s,
                "perf/learner_idle_share": waited_s / total_s,
            }
        )

    def _publish(self, order: Publish) -> None:
        with self._watch.time("update_weights"):
            tensors = self._backend.named_tensors()
            if self._leader is not None:
                self._leader.handoff.publish(PolicyVersion(order.number, order.step), tensors)
            else:
                for _ in tensors:  # the export is collective
                    pass

    def _finish(self, order: Finish) -> None:
        self._state = "finishing"
        if order.is_complete:
            self._backend.save_hf(self._weights_dir)
            if self._ranks.is_leader:
                log.info("the weights of step %d are in %s", self._step, self._weights_dir)
