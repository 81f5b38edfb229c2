"""A stand-in for the part of a supervisor that operations use."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.control.api.operations import Begun
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.service_command import Pause
from asyncrl.core.states import RunState


class ScriptedCrew:
    """Notes what it is asked; services in `unreachable` cannot be told anything, and the first ask fails with
    the first of `failures`, the next with the next.
    """

    def __init__(self) -> None:
        self.state = RunState.RUNNING
        self.replicas = [0, 2]
        self.num_draining = 0
        self.learner_life = 0
        self.unreachable: set[str] = set()
        self.failures: list[Exception] = []
        self.told: list[tuple[str, str]] = []

    def scale(self, replicas: int) -> Begun:
        self.told.append(("crew", f"scale {replicas}"))
        return Begun(replicas)

    def drain(self, index: int) -> Begun:
        self.told.append(("crew", f"drain {index}"))
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

    def stop(self) -> None:
        self.told.append(("crew", "stop"))
