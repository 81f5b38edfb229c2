"""Lookout of the supervisor: reports obstacles, which last, and notices, which happened once.

It ends a run that cannot go on.
"""

from __future__ import annotations

import logging

from asyncrl.control.diagnosis import obstacles
from asyncrl.control.diagnosis.watch import ObstacleWatch
from asyncrl.control.fleet.units import STARTING_STATES
from asyncrl.control.reconciler.status_events import FINAL_ERRORS
from asyncrl.control.record.events import KEPT, EventLog, Kind
from asyncrl.core.errors import ServiceFailed, WouldRepeat
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.states import SERVICE_ENDS, ServiceState
from asyncrl.core.status.service import BUFFER, LEARNER, ServiceStatus
from asyncrl.core.status.statuses import Statuses

log = logging.getLogger(__name__)

TOLD_BY_OTHERS = (Cause.SERVICE_DOWN, Cause.STALL)
"""Obstacles with events of their own: `exit`, `restart`, `ready` and `stall`."""


class Lookout:
    """See the module. One thread looks, any may read."""

    def __init__(self, events: EventLog, runtime: Runtime) -> None:
        self._runtime = runtime
        self._events = events
        self._watch = ObstacleWatch()

    @property
    def present(self) -> list[Obstacle]:
        """The obstacles of the last look, those that block the run first."""
        return self._watch.present

    @property
    def blocking(self) -> Obstacle | None:
        """The obstacle that blocks the run, as a service reported it; None without one."""
        known = (one for one in self.present if one.blocks and one.cause is not Cause.STALL)
        return next(known, None)

    @property
    def failing_groups(self) -> tuple[str, str] | None:
        """Service whose groups or rewards fail, and the reason; None if no service reports that."""
        told = (one for one in self.present if one.cause in (Cause.REWARDS_FAIL, Cause.GROUPS_FAIL))
        found = next(told, None)
        return (found.service, found.sentence) if found else None

    @property
    def is_held_up(self) -> bool:
        return any(one.blocks for one in self.present)

    def look(self, statuses: Statuses, stall: str, write_error: str) -> None:
        """Update from the statuses and report obstacles to the run's next step.

        Args:
            stall: The watchdog's report, empty while steps are finished.
            write_error: Error in writing to the run's folder, empty without one.
        """
        own = (Obstacle("", Cause.DISK_FULL, write_error),) if write_error else ()
        supervisor = ServiceStatus(state=ServiceState.READY, obstacles=own)
        found = obstacles.gather(statuses | {"supervisor.0": supervisor}, stall)
        for news in self._watch.look(self._runtime.wall_ns() / 1e9, found):
            if news.obstacle.cause in TOLD_BY_OTHERS:
                continue
            service = news.obstacle.service
            log.warning("%s: %s", service, news.text)
            self._events.add("obstacle", service, news.text, cause=news.obstacle.cause, is_over=news.is_over)

    def judge(self, statuses: Statuses) -> None:
        """End a run that cannot go on, by what the last look found.

        Raises:
            ServiceFailed: No replica can take any version; WouldRepeat where the engine refused it.
        """
        if (end := obstacles.verdict(self.present, statuses)) is not None:
            is_refusal = end.cause is Cause.WEIGHTS_REFUSED  # a full /dev/shm may be free at the next start
            error = WouldRepeat if is_refusal else ServiceFailed
            raise error(f"{end.service} can take no version, nor can another replica: {end.sentence}")


def would_repeat(status: ServiceStatus | None, failure: ServiceFailed) -> bool:
    """Tell whether the next start would meet the same `failure`; training that went astray may not.

    Args:
        status: Of the service that failed, as it was last heard, if it ever was.
    """
    kinds = set(status.error_kinds if status is not None else ()) & FINAL_ERRORS
    return bool(kinds - {"UnstableTraining"}) or isinstance(failure, WouldRepeat)


def why_unsaved(status: ServiceStatus, deadline_s: float) -> str | None:
    """Return why a learner that was to stop has left no checkpoint, None if it has or had none to write.

    Args:
        deadline_s: That it had.
    """
    state = status.state
    if state == ServiceState.ENDED or state in STARTING_STATES:
        return None
    if state in SERVICE_ENDS:
        word = "died" if state == ServiceState.DEAD else "failed"
        return f"{word}: {status.error or 'without a message'}"
    return f"did not end within {deadline_s:g} s"


class Notices:
    """Record of notices: an event for each, once per start of the run, even if the supervisor is replaced."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._told: set[str] | None = None

    def look(self, statuses: Statuses) -> None:
        """Report the guard's findings, checkpoints and lost journals that the statuses contain."""
        if (learner := statuses.learner) is not None:
            for one in learner.findings:
                text = f"the guard found, {one.text}"
                self._tell("guard", LEARNER, text, finding=one.kind, step=one.step)
            for sentence in learner.torn:
                self._tell("checkpoint", LEARNER, sentence)
        if (buffer := statuses.buffer) is not None:
            for sentence in buffer.journal.told_losses:
                self._tell("journal", BUFFER, sentence)

    def _tell(self, kind: Kind, service: str, text: str, **fields: object) -> None:
        told = self._told = self._told_in_this_life() if self._told is None else self._told
        if text not in told:
            told.add(text)
            self._events.add(kind, service, text, **fields)

    def _told_in_this_life(self) -> set[str]:
        told: set[str] = set()
        for event in self._events.newest(KEPT):
            is_start = (event["kind"], event.get("service")) == ("start", "run")
            told = set() if is_start else told | {str(event.get("text"))}
        return told
