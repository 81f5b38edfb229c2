"""What an operator may ask of a live run: scale, drain, pause, unpause, checkpoint, tighten, stop.

Owns the checks of what is asked, and which service is told what. Never starts or ends a process: `Crew` does.
Invariant: a refused command has changed nothing. A pause is marked in the run's folder before anyone is told,
so a service that dies meanwhile, or the supervisor, is paused when it is started again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.control import plan
from asyncrl.control.record.events import EventLog
from asyncrl.control.roster import MAX_REPLICAS, Roster
from asyncrl.errors import ConfigError, DeadlineExceeded, RemoteError, ServiceFailed
from asyncrl.service import read_paused, write_paused

log = logging.getLogger(__name__)

RUNNING = "running"
LEAVING = ("stopping", "finished", "stopped", "failed")
PAUSED_SERVICES = ("buffer.0", "learner.0")
COMMANDS = ("scale", "drain", "pause", "unpause", "checkpoint", "tighten", "stop")


class Crew(Protocol):
    """The part of a supervisor that operations use. Each call is safe from any thread."""

    @property
    def state(self) -> str:
        """The run's: starting, running, stopping, or how it ended."""

    @property
    def replicas(self) -> list[int]:
        """Indices of the rollout replicas that serve, or will: none that drains."""

    @property
    def num_draining(self) -> int:
        """Leavers whose processes are still up."""

    def scale(self, replicas: int) -> dict[str, Any]:
        """Want so many replicas from now on."""

    def drain(self, index: int) -> dict[str, Any]:
        """Let rollout.`index` finish and leave; as many are wanted as before."""

    def ask(self, service: str, command: str, args: dict[str, Any]) -> dict[str, Any]:
        """Pass a command on to a service."""

    def stop(self) -> None:
        """End the run in order."""


@dataclass(frozen=True)
class Operations:
    """Carries out the commands of the control API."""

    roster: Roster
    crew: Crew
    events: EventLog

    @property
    def is_paused(self) -> bool:
        """Whether the run was paused, and not unpaused since."""
        return read_paused(self.roster.run_dir) == self.roster.run_id

    def perform(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Do what was asked, and return what was begun.

        Raises:
            ConfigError: There is no such command, its arguments make no sense, or not in the run's state.
            ServiceFailed: The service that it is for could not do it.
        """
        actions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "scale": self._scale,
            "drain": self._drain,
            "pause": lambda _: self._set_paused(True),
            "unpause": lambda _: self._set_paused(False),
            "checkpoint": self._checkpoint,
            "tighten": self._tighten,
            "stop": self._stop,
        }
        assert set(actions) == set(COMMANDS)
        if name not in actions:
            raise ConfigError(f"the supervisor knows no command '{name}'")
        return actions[name](args)

    def _scale(self, args: dict[str, Any]) -> dict[str, Any]:
        replicas = args.get("replicas")
        if type(replicas) is not int or not 0 <= replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas must be a whole number from 0 to {MAX_REPLICAS}, not {replicas!r}")
        if self.crew.state != RUNNING:
            raise ConfigError(f"the run is {self.crew.state}; only a running one can be scaled")
        self.check_room(replicas)
        return self.crew.scale(replicas)

    def check_room(self, replicas: int) -> None:
        """Raise ConfigError if this machine has no room for so many replicas beside spares and leavers."""
        config = self.roster.config
        plan.check_replicas(config, replicas + config.rollout.standby + self.crew.num_draining)

    def _drain(self, args: dict[str, Any]) -> dict[str, Any]:
        index, known = args.get("index"), self.crew.replicas
        if type(index) is not int or index not in known:
            there = ", ".join(f"rollout.{one}" for one in known) or "none"
            raise ConfigError(f"there is no replica rollout.{index} to drain; there are: {there}")
        if self.crew.state != RUNNING:
            raise ConfigError(f"the run is {self.crew.state}; only a running one's replicas can be drained")
        return self.crew.drain(index)

    def _set_paused(self, is_paused: bool) -> dict[str, Any]:
        self._refuse_if_leaving()
        was_paused = self.is_paused
        write_paused(self.roster.run_dir, self.roster.run_id, is_paused)
        text = f"the run is {'paused' if is_paused else 'unpaused'}"
        log.info("%s", text)
        if is_paused != was_paused:
            self.events.add("pause", "run", text, paused=is_paused)
        return {"paused": is_paused, "unreached": self._tell(PAUSED_SERVICES, is_paused)}

    def _tell(self, services: Sequence[str], is_paused: bool) -> list[str]:
        """Tell `services` about the pause; return whom that did not reach."""
        unreached = []
        word = "pause" if is_paused else "unpause"
        for service in services:
            try:
                self.crew.ask(service, word, {})
            except (ServiceFailed, DeadlineExceeded, RemoteError) as error:
                unreached.append(service)
                log.warning("%s did not take the %s: %s", service, word, error)
        return unreached

    def keep_paused(self, statuses: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell services that are up and not as paused as the run: they were starting when it was asked."""
        is_paused = self.is_paused
        differ = [name for name in PAUSED_SERVICES if statuses.get(name, {}).get("paused") == (not is_paused)]
        if differ and self.crew.state not in LEAVING:
            self._tell(differ, is_paused)

    def _checkpoint(self, args: dict[str, Any]) -> dict[str, Any]:
        self._refuse_if_leaving()
        return self.crew.ask("learner.0", "checkpoint", {})

    def _tighten(self, args: dict[str, Any]) -> dict[str, Any]:
        max_lag, bound = args.get("max_lag"), self.roster.config.staleness.max_lag
        if type(max_lag) is not int or not 0 <= max_lag <= bound:
            raise ConfigError(f"max_lag must be a whole number from 0 to {bound}, not {max_lag!r}")
        return self.crew.ask("buffer.0", "tighten", {"max_lag": max_lag})

    def _stop(self, args: dict[str, Any]) -> dict[str, Any]:
        self.crew.stop()
        return {"state": "stopping"}

    def _refuse_if_leaving(self) -> None:
        if self.crew.state in LEAVING:
            raise ConfigError(f"the run is {self.crew.state}; there is nothing to ask of it any more")
