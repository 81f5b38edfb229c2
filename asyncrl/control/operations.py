"""Operator commands on a live run: scale, drain, pause, unpause, checkpoint, tighten, stop.

Owns the checks of each command, its delivery to services, and its route in the control API. Never
starts or ends a process: the reconciler does. Invariant: a refused command has changed nothing. A pause is
marked in the run's folder before any service is told, so a service that dies meanwhile, or the supervisor, is
paused when it is started again. A requested checkpoint is requested again until it exists.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from asyncrl.control.api import operations as api
from asyncrl.control.api.server import Answer, Route
from asyncrl.control.fleet.autoscaler import autoscaler_of
from asyncrl.control.machine.resources import check_replicas
from asyncrl.control.reconciler.reconciler import FleetReconciler
from asyncrl.control.record.events import EventLog
from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.control.roster import Roster
from asyncrl.core.errors import ConfigError, DeadlineExceeded, Refused, RemoteError, ServiceFailed, WireError
from asyncrl.core.metrics.metric import Row
from asyncrl.core.rpc.message import Message, fields_of, read_message
from asyncrl.core.runtime.interface import Event, Lock
from asyncrl.core.service import read_paused, write_paused
from asyncrl.core.service_command import Pause, Tighten, Unpause, WriteCheckpoint
from asyncrl.core.states import RUN_ENDS, RunState, ServiceState
from asyncrl.core.status.service import BUFFER, LEARNER
from asyncrl.core.status.statuses import Statuses

log = logging.getLogger(__name__)

LEAVING = (RunState.STOPPING, *RUN_ENDS)
PAUSED_SERVICES = (BUFFER, LEARNER)


class PendingCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint of `step` or later, asked of that `incarnation` of the learner in this start."""

    run_id: str
    step: int
    incarnation: int


@dataclass
class Lifecycle:
    """State of a run, and whether it was asked to end; for the watch loop and any thread of the API."""

    stop_asked: Event
    state: RunState = RunState.STARTING


@dataclass(frozen=True)
class Operations:
    """Carries out the commands of the control API.

    Attributes:
        pending_lock: Around a read of the pending checkpoint and its change, by the API and the watch loop.
    """

    roster: Roster
    fleet: FleetReconciler
    lifecycle: Lifecycle
    events: EventLog
    pending_lock: Lock

    @property
    def _pending_path(self) -> Path:
        return RunDir(self.roster.run_dir).pending_checkpoint

    @property
    def is_paused(self) -> bool:
        """Whether the run was paused, and not unpaused since."""
        return read_paused(self.roster.run_dir) == self.roster.run_id

    def perform(self, asked: api.AnyRequest) -> Message:
        """Perform the command, and return its answer.

        Raises:
            ConfigError: The arguments of the command are invalid.
            Refused: The run lacks room for the command, has not begun, or is ending.
            ServiceFailed: The addressed service could not do it.
        """
        match asked:
            case api.Scale(replicas):
                return self._scale(replicas)
            case api.DrainReplica(index):
                return self._drain(index)
            case api.Pause():
                return self._set_paused(True)
            case api.Unpause():
                return self._set_paused(False)
            case api.WriteCheckpoint():
                self._refuse_if_leaving()
                return api.CheckpointAsked(self._ask_for_checkpoint(None))
            case api.Tighten(max_lag):
                return self._tighten(max_lag)
            case api.Stop():
                return self._stop()

    def routes(self) -> dict[str, Route]:
        """Return the route of each operation, `POST /<name>`: its request and its answer are JSON."""
        return {f"POST /{name}": partial(self._answer, name) for name in api.REQUESTS}

    def _answer(self, name: str, body: Mapping[str, object]) -> Answer:
        try:
            asked = read_message(body, api.REQUESTS[name], name)
        except WireError as error:
            raise ConfigError(error.message) from error
        return fields_of(self.perform(asked))

    def _stop(self) -> api.Stopping:
        """Shut the run down gracefully; the shutdown completes even if this supervisor dies first."""
        self.lifecycle.stop_asked.set()
        self.fleet.finish_learner()
        return api.Stopping()

    def _scale(self, replicas: int) -> api.Begun:
        if replicas < 0:
            raise ConfigError(f"replicas must be a whole number from 0, not {replicas!r}")
        if self.lifecycle.state != RunState.RUNNING:
            raise Refused(f"the run is {self.lifecycle.state}; only a running one can be scaled")
        with _as_refusal():
            self.check_room(replicas)
            return self.fleet.scale(replicas)

    def check_room(self, replicas: int) -> None:
        """Raise ConfigError if this machine has no room for so many replicas beside spares and leavers."""
        config = self.roster.config
        check_replicas(config, replicas + config.rollout.standby + self.fleet.num_draining)

    def _drain(self, index: int) -> api.Begun:
        known = self.fleet.replicas
        if index not in known:
            there = ", ".join(f"rollout.{one}" for one in known) or "none"
            raise ConfigError(f"there is no replica rollout.{index} to drain; there are: {there}")
        if self.lifecycle.state != RunState.RUNNING:
            raise Refused(f"the run is {self.lifecycle.state}; only a running one's replicas can be drained")
        with _as_refusal():
            return self.fleet.drain(index)

    def _set_paused(self, is_paused: bool) -> api.Paused:
        self._refuse_if_leaving()
        was_paused = self.is_paused
        write_paused(self.roster.run_dir, self.roster.run_id, is_paused)
        text = f"the run is {'paused' if is_paused else 'unpaused'}"
        log.info("%s", text)
        if is_paused != was_paused:
            self.events.add("pause", "run", text, paused=is_paused)
        return api.Paused(is_paused, tuple(self._tell(PAUSED_SERVICES, is_paused)))

    def _tell(self, services: Sequence[str], is_paused: bool) -> list[str]:
        """Tell `services` about the pause; return the services that did not acknowledge."""
        unreached = []
        command = Pause() if is_paused else Unpause()
        for service in services:
            try:
                self.fleet.ask(service, command)
            except (ServiceFailed, DeadlineExceeded, RemoteError) as error:
                unreached.append(service)
                log.warning("%s did not take the %s: %s", service, command.word, error)
        return unreached

    def keep_paused(self, statuses: Statuses) -> None:
        """Resend Pause or Unpause to a service whose paused flag differs from the run's: it was starting."""
        is_paused = self.is_paused
        told = {BUFFER: statuses.buffer, LEARNER: statuses.learner}
        differ = [name for name, one in told.items() if one is not None and one.paused != is_paused]
        if differ and self.lifecycle.state not in LEAVING:
            self._tell(differ, is_paused)

    def _ask_for_checkpoint(self, step: int | None) -> int:
        """Request a checkpoint at `step` or later and record the request with the learner's incarnation.

        Without `step`, the learner's current step is used; on a timeout that step is unknown, so nothing is
        recorded and the timeout is raised.

        Returns:
            The current step of the learner.
        """
        incarnation = self.fleet.num_restarts(LEARNER)
        try:
            answer = self.fleet.ask(LEARNER, WriteCheckpoint())
        except DeadlineExceeded:  # the request stays queued and is lost if the learner exits
            if step is not None:
                self._take_down(step, incarnation)
            raise
        self._take_down(answer.step if step is None else step, incarnation)
        return answer.step

    def _take_down(self, step: int, incarnation: int) -> None:
        """Record a checkpoint as pending, unless one of a later step is pending: it serves both requests."""
        owed = PendingCheckpoint(self.roster.run_id, step, incarnation)
        with self.pending_lock:
            before = self._read_pending()
            if before is None or before.step <= step:
                write_json(self._pending_path, msgspec.structs.asdict(owed))

    def _read_pending(self) -> PendingCheckpoint | None:
        """Return the pending checkpoint of this start; None if there is none or it cannot be read."""
        found = read_json(self._pending_path)
        if found is None or found.get("run_id") != self.roster.run_id:
            return None
        try:
            return msgspec.convert(found, PendingCheckpoint)
        except msgspec.ValidationError as error:
            log.warning("the pending checkpoint request in %s cannot be read: %s", self._pending_path, error)
            return None

    def _drop_pending(self, written: PendingCheckpoint) -> None:
        """Forget the pending checkpoint if it is `written`; keep a newer request."""
        with self.pending_lock:
            if self._read_pending() == written:
                self._pending_path.unlink(missing_ok=True)

    def renew_pending_checkpoint(self, statuses: Statuses) -> None:
        """Request the pending checkpoint again if the learner was restarted since and has not written it.

        Waits until the learner has reached that step again; an earlier checkpoint would hold less training.
        """
        try:
            self._renew_pending(statuses)
        except OSError as error:  # a full disk ends no run; the next pulse tries again
            log.warning("the pending checkpoint requests cannot be read or written: %s", error)

    def _renew_pending(self, statuses: Statuses) -> None:
        owed = self._read_pending()
        if owed is None or self.lifecycle.state in LEAVING:
            return
        known = statuses.buffer.checkpoints if statuses.buffer is not None else ()
        if max(known, default=-1) >= owed.step:
            self._drop_pending(owed)
            return
        learner = statuses.learner
        is_up = learner is not None and learner.state == ServiceState.READY
        is_back = is_up and learner is not None and learner.step >= owed.step
        if owed.incarnation == self.fleet.num_restarts(LEARNER) or not is_back:
            return
        try:
            self._ask_for_checkpoint(owed.step)
        except DeadlineExceeded as error:
            log.warning("the learner is late to say whether it writes the checkpoint: %s", error)
        except (ServiceFailed, RemoteError) as error:  # the next pulse asks again
            log.warning(
                "the requested checkpoint of step %d or later is not written yet: %s", owed.step, error
            )

    def _tighten(self, max_lag: int) -> api.Tightened:
        bound = self.roster.config.staleness.max_lag
        if not 0 <= max_lag <= bound:
            raise ConfigError(f"max_lag must be a whole number from 0 to {bound}, not {max_lag!r}")
        return api.Tightened(self.fleet.ask(BUFFER, Tighten(max_lag)).max_lag)

    def _refuse_if_leaving(self) -> None:
        if self.lifecycle.state in LEAVING:
            raise Refused(f"the run is {self.lifecycle.state}; it takes no more commands")


@contextlib.contextmanager
def _as_refusal() -> Iterator[None]:
    """Turn ConfigError into Refused: valid arguments can only fail by run state or host capacity."""
    try:
        yield
    except ConfigError as error:
        raise Refused(error.message, hint=error.hint) from error


class Autoscaling:
    """Carries out the autoscaler's decisions, as an operator's would be; says once why one is refused."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._autoscaler = autoscaler_of(operations.roster.config)
        self._refusal = ""

    def look(self, rows: Sequence[Row], now: float) -> None:
        """Have the learner's newest `rows` judged while the run is at work, and scale it as decided."""
        run, fleet = self._operations, self._operations.fleet
        if self._autoscaler is None or run.lifecycle.state != RunState.RUNNING or run.is_paused:
            return
        decision = self._autoscaler.decide(now, fleet.wanted, fleet.num_ready, rows)
        if decision is None:
            return
        try:
            run.check_room(decision.replicas)
            fleet.scale(decision.replicas, why=decision.reason)
            self._refusal = ""
        except ConfigError as error:  # no room; it asks again
            text = f"not scaled to {decision.replicas} replicas: {error.message}"
            if text != self._refusal:
                self._refusal = text
                log.warning("%s", text)
                run.events.add("autoscale", "rollout", text)
