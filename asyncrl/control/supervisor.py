"""The supervisor: starts a run's services, watches and repairs them, ends them, writes down what happened.

The watch loop
  consumes: the services' statuses, the learner's rows, finished evaluations, API requests
  waits for: its own pulse of `PULSE_S`          unblocked by: time, or the stop event
  produces: the snapshot for the API, metrics on disk, the outcome
Invariant: a run that cannot be kept up ends with the error of the service that it failed for; nothing is left
running. Repairs are decided in `fleet/` and carried out by `reconciler/`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from asyncrl.buffer.ledger.tickets import DropReason
from asyncrl.control.diagnosis.lookout import Lookout, Notices, why_unsaved, would_repeat
from asyncrl.control.diagnosis.waits import diagnose
from asyncrl.control.diagnosis.watchdog import Watchdog
from asyncrl.control.fleet.units import STARTING_STATES
from asyncrl.control.machine.kernel import Kernel
from asyncrl.control.operations import Autoscaling, Lifecycle, Operations
from asyncrl.control.phases import phase_of
from asyncrl.control.ray.launcher import Launcher
from asyncrl.control.reconciler.reconciler import FleetReconciler
from asyncrl.control.record.events import EventLog
from asyncrl.control.record.outcome import Outcome, write_outcome
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.record.summary import write_summary
from asyncrl.control.record.syncing import WeightsAnswer, weights_answer
from asyncrl.control.roster import Roster
from asyncrl.control.rows import metering
from asyncrl.control.rows.collector import RowCollector
from asyncrl.control.rows.metering import Pace
from asyncrl.control.rows.recorder import Recorder
from asyncrl.control.snapshot import Health, Snapshot, view_ledger, view_service
from asyncrl.core.errors import AsyncrlError, FolderRemoved, ServiceFailed, WouldRepeat
from asyncrl.core.files.durable import reserve_room
from asyncrl.core.metrics.metric import Row
from asyncrl.core.rpc.message import Message
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import AnyCommand, unknown_command
from asyncrl.core.states import SERVICE_ENDS, RunState, ServiceState
from asyncrl.core.status.service import BUFFER, LEARNER, ServiceStatus, SupervisorStatus
from asyncrl.core.status.statuses import Statuses

log = logging.getLogger(__name__)

PULSE_S = 0.25
LAST_STATUS_DEADLINE_S = 5.0
EVALUATION_WAIT_S = 120.0
FAILED_BATCHES_LIMIT = 2
LEARNER_STOP_S = 120.0
SERVICE_STOP_S = 20.0
EVENTS_TOLD = 50
EVENTS_RESERVE_BYTES, OUTCOME_RESERVE_BYTES = 1 << 18, 1 << 15


class Supervisor:
    """Implements `asyncrl.core.service.Service` for the run as a whole.

    Attributes:
        fleet: The services of the run. operations: The commands of its operator.
        summarise: Writes the summary of the run, and draws its curves.
        see_off: Called when the outcome is in the status, before the final state, by which the head ends Ray.
    """

    def __init__(
        self,
        roster: Roster,
        launcher: Launcher,
        recorder: Recorder,
        runtime: Runtime,
        kernel: Kernel | None = None,
    ) -> None:
        self._runtime = runtime
        self._roster = roster
        self._launcher = launcher
        self._run_dir = RunDir(roster.run_dir)
        self._events = EventLog(self._run_dir.events, runtime, EVENTS_RESERVE_BYTES)
        reserve_room(self._run_dir.reserve, OUTCOME_RESERVE_BYTES)
        self.fleet = FleetReconciler(roster, launcher, self._events, runtime, kernel)
        self._rows = RowCollector(self._run_dir, launcher, recorder, runtime)
        self.lifecycle = Lifecycle(runtime.event())
        self.operations = Operations(roster, self.fleet, self.lifecycle, self._events, runtime.lock())
        self._watchdog = Watchdog(roster.config.learner.groups_per_step)
        self._lookout = Lookout(self._events, runtime)
        self._stall = self._error = ""
        self._autoscaling = Autoscaling(self.operations)
        self._pace = Pace()
        self._over_since = 0.0
        self._statuses = Statuses()
        self._notices = Notices(self._events)
        self._last_evaluation = 0
        self._outcome: RunState | None = None
        self._is_saving = False
        self._identity = self._run_dir.identity
        self._learner_has_trained: bool | None = None
        self.summarise = write_summary
        self.see_off: Callable[[], None] = lambda: None

    # --- the service protocol -------------------------------------------------------------

    def run(self, stop: Event) -> None:
        """Run to the end of training, to a stop, or to the first failure; then end every service."""
        try:
            self._begin()
            if self.fleet.ending is None:
                self._watch(stop)
            outcome = self.fleet.ending or Outcome(state=RunState.FINISHED)
            if self.lifecycle.stop_asked.is_set() or stop.is_set():
                outcome = msgspec.structs.replace(outcome, state=RunState.STOPPED)
        except ServiceFailed as failure:
            outcome = self._fail(failure)
        self._end(outcome)

    def _fail(self, failure: ServiceFailed) -> Outcome:
        """Return the outcome of a run that failed, after saving its state as far as possible."""
        service = failure.message.split(" ")[0]
        is_removed = isinstance(failure, FolderRemoved)
        outcome = Outcome(
            state=RunState.FAILED,
            error=str(failure),
            service=service,
            tail=tuple(self._run_dir.tail(service)),
            would_repeat=would_repeat(self._statuses.get(service), failure),
            is_removed=is_removed,
        )
        log.error("the run failed: %s", failure)
        if not is_removed:
            self._save_what_can_be()
        return outcome

    def status(self) -> SupervisorStatus:
        """Return the head's view of the run."""
        return SupervisorStatus(
            state=ServiceState.READY, error=self._error, run=self.lifecycle.state, step=self._last_step
        )

    @property
    def _last_step(self) -> int:
        learner = self._statuses.learner
        return int(self._rows.newest.get("training/global_step", 0)) if learner is None else learner.step

    def snapshot(self) -> Snapshot:
        """Return the snapshot that the CLI, the page and the API show."""
        statuses, config, obstacles = self._statuses, self._roster.config, self._lookout.present
        learner, facts = statuses.learner, self.fleet.report.facts
        return Snapshot(
            run=config.run.name,
            run_id=self._roster.run_id,
            folder=str(self._run_dir.path),
            state=self.lifecycle.state,
            phase=phase_of(self.lifecycle.state, statuses, is_saving=self._is_saving),
            health=self._health(),
            step=self._last_step,
            steps=config.learner.steps,
            time_left_s=self._pace.time_left_s(config.learner.steps),
            max_lag=config.staleness.max_lag,
            ready_groups=config.staleness.ready_batches * config.learner.groups_per_step,
            torn=learner.torn if learner is not None else (),
            resumed_step=learner.resumed_step if learner is not None else 0,
            paused=self.operations.is_paused,
            metrics=self._rows.newest,
            services={name: view_service(one, facts(name)) for name, one in statuses.items()},
            bottleneck=diagnose(self._rows.newest, statuses, obstacles),
            obstacles=tuple(obstacles),
            events=tuple(self._events.newest(EVENTS_TOLD)),
            error=self._error or None,
            outcome=self._outcome,
            ledger=view_ledger(statuses.buffer),
            accuracy=metering.accuracy(self._rows.evaluation),
            evaluation=self._rows.evaluation,
        )

    def _health(self) -> Health:
        is_held_up = self._watchdog.is_stalled or self._lookout.is_held_up
        is_ill = self.lifecycle.state == RunState.FAILED or self.fleet.is_degraded or is_held_up
        return Health.DEGRADED if is_ill else Health.OK

    def weights(self) -> WeightsAnswer:
        """Return the weights in the last statuses of coordinator, publisher and replicas."""
        return weights_answer(self._statuses)

    def command(self, command: AnyCommand) -> Message:
        """Nothing can be asked of it by its host: `operations` are for those who have the run's key."""
        raise unknown_command("the supervisor", command)

    # --- the watch loop -------------------------------------------------------------------

    def _begin(self) -> None:
        rollout = self._roster.config.rollout
        is_taken_over = self.fleet.begin(rollout.replicas.start, rollout.standby)
        if self.fleet.is_learner_ending:  # the one before this was asked to stop
            self.lifecycle.stop_asked.set()
        self._rows.begin(self.fleet.num_restarts(LEARNER), is_taken_over=is_taken_over)
        self._learner_has_trained = None if is_taken_over else False
        fault_point("supervisor.begun")

    def _watch(self, stop: Event) -> None:
        while not (self.lifecycle.stop_asked.is_set() or stop.is_set()):
            self._observe()
            if self._is_learner_done():
                self._await_evaluations(stop)
                return
            stop.wait(PULSE_S)
        self._stop_learner()

    def _stop_learner(self) -> None:
        """Have the learner write its checkpoint and end, while the services it needs are kept up.

        One that has trained nothing since it was started has nothing to write.

        Raises:
            ServiceFailed: It did not: what it did since its last checkpoint is lost.
        """
        self.lifecycle.state = RunState.STOPPING
        self.fleet.finish_learner()
        self._statuses = self.fleet.pulse()  # it may have trained since the last one
        self._keep_time(self._runtime.now())
        if not self._has_trained():
            return
        self._is_saving = True
        ranks = self.fleet.learners
        ending = self._runtime.spawn("stop-learner", partial(self._launcher.stop, ranks, LEARNER_STOP_S))
        while ending.is_alive():
            self._statuses = self.fleet.pulse()
            self._look_out()
            self._collect_rows()
            ending.join(PULSE_S)
        self._is_saving = False
        last = self._launcher.statuses(ranks, LAST_STATUS_DEADLINE_S)
        self._statuses = self._statuses | last  # anew: the API may be reading the other one
        self._collect_rows()
        leader = last.get(LEARNER, ServiceStatus(state=ServiceState.ENDED))
        if (why := why_unsaved(leader, LEARNER_STOP_S)) is not None:
            lost = "it wrote no checkpoint as the run was stopped, which goes on from the newest one"
            known = self._lookout.blocking
            held_up = f" ({known.sentence})" if known is not None and known.sentence not in why else ""
            raise ServiceFailed(f"learner.0 {why}{held_up}; {lost}")

    def _has_trained(self) -> bool:
        """Whether the learner may have progress that its newest checkpoint lacks.

        What it said last counts while it is silent. A supervisor that took over assumes so at first.
        """
        return self._learner_has_trained is not False

    def _observe(self) -> None:
        if self._run_dir.identity != self._identity:
            raise FolderRemoved(f"supervisor.0 failed: the run's folder {self._run_dir.path} was removed")
        self._statuses = self.fleet.pulse()
        if (end := self.fleet.given_up) is not None:
            raise (WouldRepeat if end.would_repeat else ServiceFailed)(end.reason)
        self._look_out()
        self._lookout.judge(self._statuses)
        self._check_groups()
        is_learner_up = self._statuses.state(LEARNER) == ServiceState.READY
        if self.lifecycle.state == RunState.STARTING and is_learner_up:
            self.lifecycle.state = RunState.RUNNING
        self._keep_time(self._runtime.now())
        self.operations.keep_paused(self._statuses)
        self.operations.renew_pending_checkpoint(self._statuses)
        self._autoscaling.look(self._collect_rows(), self._runtime.now())
        self._rows.collect_evaluations(self._statuses)
        self._watch_for_stalls()

    def _look_out(self) -> None:
        self._rows.write_rest()
        error = self._rows.write_error or self.fleet.file.write_error
        unwritten = f"{self._run_dir.path} cannot be written: {error}" if error else ""
        self._lookout.look(self._statuses, self._stall if self._watchdog.is_stalled else "", unwritten)

    def _keep_time(self, now: float) -> None:
        """Take note of how fast steps are done and tokens come."""
        self._rows.note(now, self._statuses)
        if self._statuses.state(LEARNER) in STARTING_STATES:
            self._learner_has_trained = False
        if (learner := self._statuses.learner) is not None:
            self._learner_has_trained = learner.has_trained
            self._last_evaluation = learner.last_evaluation
            self._pace.note(now, learner.step, is_working=not self.operations.is_paused)

    def _check_groups(self) -> None:
        """A run whose first groups all fail would never take a step."""
        buffer = self._statuses.buffer
        limit = FAILED_BATCHES_LIMIT * self._roster.config.learner.groups_per_step
        if buffer is None or buffer.trained:
            return
        if buffer.dropped.get(DropReason.POISON.value, 0) >= limit:
            name, why = self._lookout.failing_groups or ("rollout.0", "see its log")
            raise ServiceFailed(f"{name} gave up the first {limit} prompts: {why}")

    def _watch_for_stalls(self) -> None:
        is_meant_to_train = self.lifecycle.state == RunState.RUNNING and not self.operations.is_paused
        known = self._lookout.blocking
        stall = self._watchdog.look(
            self._runtime.now(), self._statuses, is_meant_to_train=is_meant_to_train, known=known
        )
        if stall is not None:
            log.warning("%s", stall.text)
            self._stall = stall.text
            self._events.add("stall", stall.who, stall.text, waiting=list(stall.edges))
            self.fleet.dump_stacks()

    def _is_learner_done(self) -> bool:
        """Tell whether the leader has ended by itself, and no other rank is at work or awaited any more."""
        if not self.fleet.has_learner_ended:
            return False
        self._over_since = self._over_since or self._runtime.now()
        others = {name: self._statuses[name].state for name in self.fleet.learners[1:]}
        is_late = self._runtime.now() - self._over_since > LEARNER_STOP_S
        if is_late:
            log.warning("the learner is over; of its other ranks: %s", others)
        return set(others.values()) <= set(SERVICE_ENDS) or is_late

    def _collect_rows(self) -> list[Row]:
        """Take down the learner's rows since the last pulse, and return them."""
        self._notices.look(self._statuses)
        return self._rows.collect(self._statuses, self.fleet.num_restarts(LEARNER))

    def _await_evaluations(self, stop: Event) -> None:
        end = self._runtime.now() + EVALUATION_WAIT_S
        while self._runtime.now() < end and not (self.lifecycle.stop_asked.is_set() or stop.is_set()):
            self._observe()
            buffer = self._statuses.buffer
            is_pending = buffer is not None and buffer.evaluations_pending > 0
            if not is_pending and self._rows.has_evaluation(self._last_evaluation):
                return
            self._runtime.sleep(PULSE_S)
        log.warning("an evaluation was still open after %g s", EVALUATION_WAIT_S)

    # --- the end --------------------------------------------------------------------------

    def _save_what_can_be(self) -> None:
        """Let the learner write its checkpoint, if it and the buffer live, and it was not asked before."""
        if self.lifecycle.state == RunState.STOPPING:
            return
        states = [self._statuses.state(name) for name in (LEARNER, BUFFER)]
        if states == [ServiceState.READY, ServiceState.READY]:
            self._launcher.stop(self.fleet.learners, LEARNER_STOP_S)

    def _end(self, outcome: Outcome) -> None:
        self.lifecycle.state, self._error = RunState.STOPPING, outcome.error
        unstopped, last = self.fleet.stop(SERVICE_STOP_S, outcome, has_work=self._has_trained())
        ended = {name: status for name, status in last.items() if status.state == ServiceState.ENDED}
        self._statuses = self._statuses | ended
        if unstopped:
            log.warning("killed after %g s: %s", SERVICE_STOP_S, ", ".join(sorted(unstopped)))
        self._rows.close()
        try:
            self.summarise(self._run_dir, self._roster.config, self._statuses, outcome)
        except (OSError, AsyncrlError) as error:
            log.error("the summary could not be written: %s", error)
        if why := write_outcome(self._run_dir, outcome):  # a terminal that watches has it from the snapshot
            log.error("the outcome could not be written: %s", why)
        text = outcome.error or f"the run has {outcome.state}"
        self._events.add("finish", outcome.service or "run", text)
        self._events.close()
        self._outcome = outcome.state
        self.see_off()
        self.lifecycle.state = outcome.state
