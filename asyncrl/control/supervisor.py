"""The supervisor: starts a run's services, watches them, ends them, and writes down what happened.

The watch loop
  consumes: the services' statuses, the learner's rows, finished evaluations, API requests
  waits for: its own pulse of `PULSE_S`          unblocked by: time, or the stop event
  produces: the snapshot for the API, metrics on disk, the outcome
Invariant: a service that fails ends the run with that service's own error; nothing is left running.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from asyncrl.control import plan
from asyncrl.control.fleet import Fleet
from asyncrl.control.launch.ray_launcher import Launcher
from asyncrl.control.record import metering
from asyncrl.control.record.recorder import FIRST_OF_LIFE, Recorder, load_rows
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.record.summary import write_summary
from asyncrl.control.record.syncing import weights_answer
from asyncrl.control.roster import MAX_REPLICAS, Roster
from asyncrl.control.vitals import DRAINING, SILENT, Vitals
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded, ServiceFailed

log = logging.getLogger(__name__)

PULSE_S = 0.25
STATUS_DEADLINE_S = 5.0
EVALUATION_WAIT_S = 120.0
FAILED_BATCHES_LIMIT = 2
LEARNER_STOP_S = 120.0
SERVICE_STOP_S = 20.0


class Supervisor:
    """Implements `asyncrl.service.Service` for the run as a whole."""

    def __init__(self, roster: Roster, launcher: Launcher, recorder: Recorder) -> None:
        self._roster = roster
        self._launcher = launcher
        self._recorder = recorder
        self._run_dir = RunDir(roster.run_dir)
        self._fleet = Fleet(roster, launcher)
        self._lock = threading.Lock()
        self._meter = metering.Meter()
        self._is_stop_asked = threading.Event()
        self._statuses: dict[str, dict[str, Any]] = {}
        self._vitals = Vitals(roster.config.launcher.start_deadline_s)
        self._row: dict[str, Any] = {}
        self._accuracy: float | None = None
        self._num_rows = 0
        self._seen_evaluations = metering.evaluation_ids(load_rows(self._run_dir.metrics))
        self._state = "starting"
        self._error = ""

    # --- the service protocol -------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Run to the end of training, to a stop, or to the first failure; then end every service."""
        outcome: dict[str, Any] = {"state": "finished", "error": "", "service": "", "tail": []}
        try:
            self._fleet.start()
            self._watch(stop)
            if self._is_stop_asked.is_set() or stop.is_set():
                outcome["state"] = "stopped"
        except ServiceFailed as failure:
            service = failure.message.split(" ")[0]
            outcome.update(state="failed", error=str(failure), service=service)
            outcome["tail"] = self._run_dir.tail(service)
            log.error("the run failed: %s", failure)
        self._end(outcome)

    def status(self) -> dict[str, Any]:
        """Return the snapshot that the CLI and the API show."""
        buffer = self._statuses.get("buffer.0", {})
        services = {
            name: {key: status.get(key) for key in ("state", "version", "pid", "address", "gateway")}
            for name, status in self._statuses.items()
        }
        learner = self._statuses.get("learner.0", {})
        return {
            "run": self._roster.config.run.name,
            "state": self._state,
            "step": learner.get("step", 0),
            "steps": self._roster.config.learner.steps,
            "resumed_step": learner.get("resumed_step", 0),
            "metrics": self._row,
            "services": services,
            "error": self._error or None,
            "ledger": {key: buffer[key] for key in metering.LEDGER_KEYS if key in buffer},
            "accuracy": self._accuracy,
        }

    def weights(self) -> dict[str, Any]:
        """Return what the coordinator, the publisher and the replicas said of weights in the last pulse."""
        return weights_answer(self._statuses)

    def command(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """`scale {replicas}`, `tighten {max_lag}` or `stop {}`."""
        if name == "scale":
            return self._scale(args)
        if name == "tighten":
            return self._tighten(args)
        if name == "stop":
            self._is_stop_asked.set()
            return {"state": "stopping"}
        raise ConfigError(f"the supervisor knows no command '{name}'")

    def _tighten(self, args: dict[str, Any]) -> dict[str, Any]:
        max_lag, bound = args.get("max_lag"), self._roster.config.staleness.max_lag
        if type(max_lag) is not int or not 0 <= max_lag <= bound:
            raise ConfigError(f"max_lag must be a whole number from 0 to {bound}, not {max_lag!r}")
        return self._launcher.command("buffer.0", "tighten", {"max_lag": max_lag}, STATUS_DEADLINE_S)

    def _scale(self, args: dict[str, Any]) -> dict[str, Any]:
        replicas = args.get("replicas")
        if type(replicas) is not int or not 0 <= replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas must be a whole number from 0 to {MAX_REPLICAS}, not {replicas!r}")
        if self._state != "running":
            raise ConfigError(f"the run is {self._state}; only a running one can be scaled")
        with self._lock:
            plan.check_replicas(self._roster.config, replicas + self._fleet.num_draining)
            return self._fleet.scale(replicas)

    # --- the watch loop -------------------------------------------------------------------

    def _watch(self, stop: threading.Event) -> None:
        while not (self._is_stop_asked.is_set() or stop.is_set()):
            self._observe()
            if self._is_learner_done():
                self._await_evaluations(stop)
                return
            stop.wait(PULSE_S)
        self._state = "stopping"
        self._launcher.stop(self._fleet.learners, LEARNER_STOP_S)
        self._observe()

    def _observe(self) -> None:
        with self._lock:
            names = self._fleet.names
            self._statuses = self._launcher.statuses(names, STATUS_DEADLINE_S)
            self._check_health()
            self._fleet.reap(self._statuses)
        if self._state == "starting" and self._statuses["learner.0"].get("state") == "training":
            self._state = "running"
        self._collect_rows()
        self._collect_evaluations()

    def _check_health(self) -> None:
        # A process that is gone made others fail: it is the one to name.
        by_cause = sorted(self._statuses.items(), key=lambda item: item[1].get("state") != "gone")
        for name, status in by_cause:
            if (state := status.get("state")) in ("failed", "gone"):
                raise ServiceFailed(f"{name} {state}: {status.get('error', '')}")
        for late in self._vitals.overdue(time.monotonic(), self._statuses):
            if late.state == DRAINING:  # its leases run out, and its prompts are issued again
                log.warning("%s was still draining after %g s and is ended", late.name, late.limit_s)
                self._fleet.abandon(late.name)
            elif late.state == SILENT:
                raise ServiceFailed(f"{late.name} gave no sign of life for {late.limit_s:g} s")
            else:
                raise ServiceFailed(f"{late.name} was still {late.state} after {late.limit_s:g} s")
        self._check_groups()

    def _check_groups(self) -> None:
        """A run whose first groups all fail would never take a step."""
        buffer = self._statuses.get("buffer.0", {})
        limit = FAILED_BATCHES_LIMIT * self._roster.config.learner.groups_per_step
        if not buffer.get("trained") and buffer.get("dropped", {}).get("poison", 0) >= limit:
            raise ServiceFailed(f"{self._fleet.first_replica} gave up the first {limit} prompts; see its log")

    def _is_learner_done(self) -> bool:
        return all(self._statuses[name].get("state") == "ended" for name in self._fleet.learners)

    def _collect_rows(self) -> None:
        if "step" not in self._statuses.get("learner.0", {}):
            return
        try:
            found = self._launcher.command("learner.0", "rows", {"after": self._num_rows}, STATUS_DEADLINE_S)
        except DeadlineExceeded:
            return  # the next pulse asks again
        if not found["rows"]:
            return
        is_first = self._num_rows == 0  # its time holds the start of this life, not a step's work
        self._num_rows += len(found["rows"])
        rates = self._meter.update(time.monotonic(), self._statuses)
        for row in found["rows"]:
            self._row = {**row, **rates, FIRST_OF_LIFE: float(is_first and row is found["rows"][0])}
            self._recorder.record(self._row)

    def _collect_evaluations(self) -> None:
        for evaluation in self._statuses.get("buffer.0", {}).get("evaluations", []):
            if evaluation["id"] in self._seen_evaluations:
                continue
            self._seen_evaluations.add(evaluation["id"])
            row = metering.evaluation_row(evaluation)
            self._accuracy = metering.accuracy(row)
            self._recorder.record(row)

    def _await_evaluations(self, stop: threading.Event) -> None:
        end = time.monotonic() + EVALUATION_WAIT_S
        while time.monotonic() < end and not (self._is_stop_asked.is_set() or stop.is_set()):
            self._observe()
            last = self._statuses["learner.0"].get("last_evaluation")
            is_pending = self._statuses.get("buffer.0", {}).get("evaluations_pending", 0)
            if last is not None and last in {0, *self._seen_evaluations} and not is_pending:
                return
            time.sleep(PULSE_S)
        log.warning("an evaluation was still open after %g s", EVALUATION_WAIT_S)

    # --- the end --------------------------------------------------------------------------

    def _end(self, outcome: dict[str, Any]) -> None:
        self._state = "stopping"
        with self._lock:
            unstopped, last = self._fleet.stop(SERVICE_STOP_S)
        self._statuses |= {name: status for name, status in last.items() if status["state"] == "ended"}
        if unstopped:
            log.warning("killed after %g s: %s", SERVICE_STOP_S, ", ".join(sorted(unstopped)))
        self._recorder.close()
        try:
            write_summary(self._run_dir, self._roster.config, self._statuses, outcome)
        except (OSError, AsyncrlError) as error:
            log.error("the summary could not be written: %s", error)
        write_json(self._run_dir.outcome, outcome)
        self._error, self._state = outcome["error"], outcome["state"]
