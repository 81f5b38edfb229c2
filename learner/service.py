"""A learner rank as a service: performs the leader's orders, one after another.

consumes: orders, trajectories      waits for: the next order
unblocked by: the leader            produces: updated weights, versions, checkpoints, metric rows
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from asyncrl.core.config.tree import Config
from asyncrl.core.metrics.row_log import RowLog
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.rpc.message import Message
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service_command import (
    AnyCommand,
    HandOverRows,
    Pause,
    PauseState,
    Rows,
    StepsDone,
    Unpause,
    WriteCheckpoint,
    unknown_command,
)
from asyncrl.core.staleness import PolicyVersion
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import LearnerStatus
from learner.algorithms.diagnostics.summary import throughput_metrics
from learner.algorithms.objective import Objective
from learner.backend import Models
from learner.batch_fetcher import Source
from learner.batching.probe import ProbeRows, measure_probe
from learner.checkpoint import CheckpointStore
from learner.checkpoint.node_folders import NodeFolders
from learner.checkpoint.snapshot import Snapshot
from learner.checkpoint.writer import BackgroundWriter
from learner.leader.leader import Leader
from learner.orders import Adjust, Checkpoint, Finish, Order, Publish, Restore, StepOutcome, Train, Wait
from learner.ranks import Ranks
from learner.record.recorder import Recorder, Recording
from learner.report import (
    Efficiency,
    ProfilerWindow,
    Stopwatch,
    describe_time,
    make_efficiency,
)
from learner.striped import StripedPublish
from learner.trainer import CRITIC, Trained, Trainer
from weight_sync.direct.source import DirectSource
from weight_sync.memory.sharded_publish import TogetherWriter
from weight_sync.publisher_client import publish_sharded

log = logging.getLogger(__name__)


class LearnerService:
    """Implements `core.service.Service`. `leader` is given on rank 0, `recorder` with `run.record`."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        models: Models,
        objective: Objective,
        fetcher: Source,
        store: CheckpointStore,
        weights_dir: Path,
        leader: Leader | None = None,
        runtime: Runtime | None = None,
        recorder: Recorder | None = None,
        folders: NodeFolders | None = None,
        direct: DirectSource | None = None,
        striped: StripedPublish | None = None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._models = models
        self._policy, self._critic = models.policy, models.critic
        self._objective = objective
        self._store = store
        self._weights_dir = weights_dir
        self._leader = leader
        self._together = TogetherWriter(ranks)
        self._direct, self._striped = direct, striped
        self._runtime = runtime or ThreadRuntime()
        self._folders = folders or NodeFolders(ranks)
        self._writer = BackgroundWriter(ranks.rank, runtime=self._runtime, folders=self._folders)
        if leader is not None:
            leader.outcome = StepOutcome(controllers=objective.read_controllers())
            leader.checkpoints.keeper.has_marked = self._writer.has_marked
        self._watch = Stopwatch(self._runtime)
        self._recorder = recorder
        source = fetcher if recorder is None else Recording(fetcher, recorder)
        self._trainer = Trainer(config, ranks, models, objective, source, self._watch)
        self._window = ProfilerWindow(
            config.metrics.profile_steps, weights_dir.parent / "profile", ranks.rank
        )
        self._rows = RowLog(weights_dir.parent)
        self._step = self._resumed_step = 0
        self._state = ServiceState.STARTING
        self._step_began = self._runtime.now()

    def run(self, stop: Event) -> None:
        """Perform orders until the leader finishes."""
        try:
            for order in self._orders(stop):
                self._perform(order)
            self._window.close()
        finally:
            if self._direct is not None:
                self._direct.close()
            if self._recorder is not None:
                self._recorder.close()
        self._models.close()

    def status(self) -> LearnerStatus:
        return LearnerStatus(
            state=self._state,
            step=self._step,
            resumed_step=self._resumed_step,
            last_evaluation=self._leader.publishing.last_evaluation if self._leader else 0,
            paused=self._leader is not None and self._leader.is_paused,
            torn=tuple(self._leader.torn) if self._leader else (),
            checkpointed_step=self._leader.checkpoints.newest_step if self._leader else 0,
            findings=self._leader.findings if self._leader else (),
            obstacles=self._obstacles(),
        )

    def _obstacles(self) -> tuple[Obstacle, ...]:
        """Return why checkpoints cannot be written: by the leader's word, else by this rank's own."""
        if self._leader is not None and (found := self._leader.checkpoints.failures.report()):
            return found
        problem = self._writer.problem
        return (Obstacle("", Cause.CHECKPOINT_FAILS, problem),) if problem else ()

    def command(self, command: AnyCommand) -> Message:
        """Perform a command of the supervisor; ranks without the leader take only HandOverRows."""
        if isinstance(command, HandOverRows):
            handed = self._rows.hand_over(command.after)
            return Rows(handed.first, tuple(handed.rows))
        if self._leader is None:
            raise unknown_command("the learner", command)
        match command:
            case WriteCheckpoint():
                self._leader.ask_checkpoint(self._step)
                return StepsDone(self._step)
            case Pause() | Unpause():
                self._leader.is_paused = isinstance(command, Pause)
                return PauseState(self._leader.is_paused)
        raise unknown_command("the learner", command)

    @cached_property
    def _efficiency(self) -> Efficiency:
        """Asked for by the leader alone: ranks that measured at once would slow one another."""
        return make_efficiency(
            Path(self._config.model.path),
            num_devices=self._ranks.world_size,
            dtype=self._config.model.dtype,
            peak_tflops=self._config.metrics.peak_tflops,
            has_inference=self._objective.needs_prox,
            has_adapters=self._config.model.lora.rank > 0,
        )

    def _orders(self, stop: Event) -> Iterator[Order]:
        if self._leader is None:
            return self._ranks.follow()
        return (self._ranks.share(order) for order in self._leader.orders(stop))

    def _perform(self, order: Order) -> None:
        match order:
            case Train():
                with self._window.step(order.step, order.is_last):
                    self._train(order)
            case Publish():
                self._publish(order)
            case Checkpoint():
                self._keep_record()
                with self._watch.time("save_checkpoint"):
                    self._writer.begin(self._store.temporary(order.step), self._snapshots())
            case Restore():
                self._restore(order)
            case Adjust():
                self._trainer.adjust(order)
            case Finish():
                self._finish(order)
            case Wait():
                if self._striped is not None and self._striped.has_lost() and self._leader is not None:
                    self._leader.publishing.has_lost_stripe = True

    def _restore(self, order: Restore) -> None:
        with self._watch.time("restore"):
            if order.has_checkpoint:
                is_starting = self._state == ServiceState.STARTING
                if is_starting and self._folders.blind:
                    self._state = ServiceState.SYNCING  # the bytes set the deadline, not the start
                with self._folders.lent(self._store.folder(order.step)) as folder:
                    self._state = ServiceState.STARTING if is_starting else self._state
                    self._trainer.restore(folder, order.controllers)
            else:
                self._trainer.restore(None, order.controllers)
        if self._recorder is not None:
            self._recorder.restart_at(order.step)
        self._step, self._resumed_step = order.step, order.step
        if self._state == ServiceState.STARTING:  # a rollback's time belongs to the step that comes after it
            self._state = ServiceState.READY
            self._begin_account()

    def _begin_account(self) -> None:
        """Let the first step's time begin here."""
        self._step_began = self._runtime.now()
        self._watch.read()
        if self._leader is not None:
            self._leader.waits.take()

    def _snapshots(self) -> dict[str, Callable[[], Snapshot]]:
        """Return the models of a checkpoint by folder name. The reference is the model of the start."""
        if self._critic is None:
            return {"": self._policy.snapshot_state}
        return {"": self._policy.snapshot_state, CRITIC: self._critic.snapshot_state}

    def _keep_record(self) -> None:
        """Force recorded steps to disk before the checkpoint: a replay begins there."""
        if self._recorder is not None:
            with self._watch.time("record"):
                self._recorder.flush()

    def _train(self, order: Train) -> None:
        if not order.is_last:
            self._trainer.add_part(order)
            return
        trained = self._trainer.train(order)
        order = trained.order
        if self._recorder is not None:
            with self._watch.time("record"):
                self._recorder.take(order, self._trainer.adjustment, trained.metrics)
        self._step = order.step + 1
        if self._leader is None:
            return
        self._leader.outcome = StepOutcome(
            trained.stale_tickets,
            trained.oversized_tickets,
            trained.refused_tickets,
            int(trained.metrics["staleness/lag_max_trained"]),
            trained.seen_ids,
            self._objective.read_controllers(),
        )
        self._record(order, trained)

    def _record(self, order: Train, trained: Trained) -> None:
        """Add the step's row; its time runs from the end of the step before, so shares add up to it."""
        assert self._leader is not None
        metrics = trained.metrics
        now = self._runtime.now()
        total_s, self._step_began = now - self._step_began, now
        num_tokens = float(sum(order.num_tokens))
        waits, stages = self._leader.waits.take(), self._watch.read()
        row = {
            "time": self._runtime.wall_ns() / 1e9,
            "training/global_step": self._step,
            **metrics,
            **describe_time(stages, waits, total_s),
            **self._efficiency.describe(metrics, stages, num_tokens),
            **throughput_metrics(order.num_tokens, total_s, self._ranks.world_size),
            "perf/learner_tokens_per_s": num_tokens / total_s,
            "weights/publish_s": stages.get("timing_s/update_weights", 0.0),
            **self._leader.publishing.client.take_times().metrics(),
        }
        row |= self._leader.checkpoints.keeper.take_metrics()
        if self._recorder is not None:
            self._recorder.remove_before(self._leader.checkpoints.oldest_kept_step)
            row |= self._recorder.take_metrics()
        self._leader.checkpoints.keeper.note_metrics(self._step, row)
        self._rows.add(row | self._leader.judge(order.step, row, trained.num_refused))

    @cached_property
    def _probe_rows(self) -> ProbeRows:
        longest = self._config.data.max_prompt_tokens + self._config.rollout.max_tokens
        return ProbeRows(Path(self._config.model.path), self._config.run.seed, longest)

    def _publish(self, order: Publish) -> None:
        publisher_client = self._leader.publishing.client if self._leader is not None else None
        if self._striped is not None:
            with self._watch.time("update_weights"):
                if not self._striped.has_room(order.token, publisher_client, self._policy):
                    return
        probe = None
        if every := self._config.weight_sync.probe_every:
            with self._watch.time("probe"):
                batch = self._probe_rows.build(order.seen_ids)
                probe = measure_probe(self._policy, batch, self._config.rollout.temperature, every)
        with self._watch.time("update_weights"):
            version = PolicyVersion(order.number, order.step)
            if self._direct is not None:
                layout = publisher_client.layout if publisher_client is not None else None
                self._direct.take(order.number, order.path, layout, self._policy)
            if self._striped is not None:
                self._striped.publish(version, self._policy, probe)
            else:
                publish_sharded(publisher_client, self._together, order.path, version, self._policy, probe)
        if (
            self._recorder is not None
            and publisher_client is not None
            and publisher_client.published == version
        ):
            self._recorder.note_weights(
                order.step, publisher_client.digest, self._config.weight_sync.bucket_bytes
            )

    def _finish(self, order: Finish) -> None:
        self._state = ServiceState.FINISHING
        if self._recorder is not None and self._leader is not None:
            oldest = self._leader.checkpoints.oldest_kept_step
            if oldest < self._step:  # the last checkpoint alone is kept: nothing would be left
                self._recorder.remove_before(oldest)
        if order.is_complete:
            self._policy.save_hf(self._weights_dir)
            if self._ranks.is_leader:
                log.info("the weights of step %d are in %s", self._step, self._weights_dir)
