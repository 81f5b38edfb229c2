"""The services of a run that are up: start, grow, shrink and end them.

A replica is two services, the engine's and its receiver's. A leaver drains first: it is asked to,
hands its tickets back, ends by itself, and only then is its process ended.
"""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.control.launch.ray_launcher import Launcher
from asyncrl.control.roster import MAX_REPLICAS, Roster
from asyncrl.errors import ConfigError, DeadlineExceeded, ServiceFailed

log = logging.getLogger(__name__)

COMMAND_DEADLINE_S = 10.0


class Fleet:
    """Owns the list of started services. Not thread-safe: the supervisor locks."""

    def __init__(self, roster: Roster, launcher: Launcher) -> None:
        self._roster = roster
        self._launcher = launcher
        self._names: list[str] = []
        self._replicas: list[int] = []
        self._draining: list[int] = []
        self._next_index = 0

    @property
    def names(self) -> list[str]:
        return list(self._names)

    @property
    def learners(self) -> list[str]:
        return [name for name in self._names if name.startswith("learner.")]

    @property
    def num_draining(self) -> int:
        """Leavers whose processes are still up."""
        return len(self._draining)

    @property
    def first_replica(self) -> str:
        """The name of a replica, for a message about all of them."""
        return next((name for name in self._names if name.startswith("rollout.")), "rollout.0")

    def start(self) -> None:
        """Start the core services and the configured number of replicas, side by side."""
        for _ in range(self._roster.config.rollout.replicas):
            self._add_replica()
        for name in self._roster.core():
            self._start(name)

    def scale(self, replicas: int) -> dict[str, Any]:
        """Start or drain replicas until `replicas` are wanted. Returns what was begun."""
        started, drained = [], []
        while len(self._replicas) < replicas:
            started.append(f"rollout.{self._add_replica()}")
        while len(self._replicas) > replicas:
            index = self._replicas.pop()
            drained.append(f"rollout.{index}")
            self._drain(index)
        log.info("scaled to %d replicas: started %s, draining %s", replicas, started, drained)
        return {"replicas": replicas, "started": started, "draining": drained}

    def _drain(self, index: int) -> None:
        try:
            self._launcher.command(f"rollout.{index}", "drain", {}, COMMAND_DEADLINE_S)
            self._draining.append(index)
        except (ServiceFailed, DeadlineExceeded):  # it is still starting and holds nothing
            self._dismiss(index)

    def _dismiss(self, index: int) -> None:
        for name in self._roster.replica(index):
            self._launcher.kill(name)
            self._names.remove(name)

    def reap(self, statuses: dict[str, dict[str, Any]]) -> None:
        """End the processes of replicas that have drained."""
        for index in list(self._draining):
            if statuses.get(f"rollout.{index}", {}).get("state") != "ended":
                continue
            self._launcher.stop(self._roster.replica(index), COMMAND_DEADLINE_S)
            self._dismiss(index)
            self._draining.remove(index)
            log.info("rollout.%d has drained and left", index)

    def abandon(self, name: str) -> None:
        """End a leaver that does not get to the end of its drain; `name` is either of its services."""
        index = int(name.rpartition(".")[2])
        if index in self._draining:
            self._dismiss(index)
            self._draining.remove(index)

    def stop(self, deadline_s: float) -> tuple[set[str], dict[str, dict[str, Any]]]:
        """End every service, those that depend on others first.

        Returns:
            Who had to be killed, and each service's last status: the account after the last event.
        """
        unstopped: set[str] = set()
        statuses: dict[str, dict[str, Any]] = {}
        for kinds in (("rollout", "learner"), ("receiver", "publisher"), ("weight_sync", "buffer")):
            names = [name for name in self._names if name.split(".")[0] in kinds]
            unstopped |= set(names) - self._launcher.stop(names, deadline_s)
            statuses |= self._launcher.statuses(names, COMMAND_DEADLINE_S)
            for name in names:
                self._launcher.kill(name)
        self._names = []
        return unstopped, statuses

    def _add_replica(self) -> int:
        if self._next_index >= MAX_REPLICAS:
            raise ConfigError(f"a run can start {MAX_REPLICAS} replicas in all, and has")
        index = self._next_index
        self._next_index += 1
        for name in self._roster.replica(index):
            self._start(name)
        self._replicas.append(index)
        return index

    def _start(self, name: str) -> None:
        self._launcher.start(self._roster.spec(name))
        self._names.append(name)
