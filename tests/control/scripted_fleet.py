"""A stand-in for the reconciler of a run's services, as operations use it."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.control.api.operations import Begun
from asyncrl.control.operations import Lifecycle
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service_command import Pause
from asyncrl.core.states import RunState


class ScriptedFleet:
    """Notes what it is asked; services in `unreachable` cannot be told anything.

    The first ask fails with the first of `failures`, the next with the next. `lifecycle` is that of the run,
    which is running at first.
    """

    def __init__(self) -> None:
        self.lifecycle = Lifecycle(ThreadEvent(), RunState.RUNNING)
        self.replicas = [0, 2]
        self.num_draining = 0
        self.learner_life = 0
        self.unreachable: set[str] = set()
        self.failures: list[Exception] = []
        self.told: list[tuple[str, str]] = []

    def num_restarts(self, name: str) -> int:
        assert name == "learner.0"
        return self.learner_life

    def scale(self, replicas: int) -> Begun:
        self.told.append(("fleet", f"scale {replicas}"))
        return Begun(replicas)

    def drain(self, index: int) -> Begun:
        self.told.append(("fleet", f"drain {index}"))
        return Begun(2, ("rollout.3",), (f"rollout.{index}",))

    def ask(self, service: str, command: Any) -> Any:
        if service in self.unreachable:
            raise ServiceFailed(f"{service} is gone")
        self.told.append((service, command.word))
        if self.failures:
            raise self.failures.pop(0)
        known = {"step": 7, "max_lag": getattr(command, "max_lag", 0), "paused": isinstance(command, Pause)}
        return msgspec.convert(
            {name: known[name] for name in command.answer.__struct_fields__}, command.answer
        )

    def finish_learner(self) -> None:
        self.told.append(("fleet", "finish learner"))
