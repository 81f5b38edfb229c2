"""A stand-in for the part of a supervisor that operations use."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import ServiceFailed


class ScriptedCrew:
    """Notes what it is asked; services in `unreachable` cannot be told anything."""

    def __init__(self) -> None:
        self.state = "running"
        self.replicas = [0, 2]
        self.num_draining = 0
        self.learner_life = 0
        self.unreachable: set[str] = set()
        self.told: list[tuple[str, str]] = []

    def scale(self, replicas: int) -> dict[str, Any]:
        self.told.append(("crew", f"scale {replicas}"))
        return {"replicas": replicas}

    def drain(self, index: int) -> dict[str, Any]:
        self.told.append(("crew", f"drain {index}"))
        return {"draining": [f"rollout.{index}"], "started": ["rollout.3"]}

    def ask(self, service: str, command: str, args: dict[str, Any]) -> dict[str, Any]:
        if service in self.unreachable:
            raise ServiceFailed(f"{service} is gone")
        self.told.append((service, command))
        return {"step": 7}

    def stop(self) -> None:
        self.told.append(("crew", "stop"))
