"""The world around a fleet machine: carries out its effects at once, on services that are only names."""

from __future__ import annotations

from collections import Counter, defaultdict

from asyncrl.control.fleet.machine import FleetMachine, FleetRules
from asyncrl.control.fleet.messages import (
    Cause,
    Drain,
    Effect,
    End,
    Event,
    Gone,
    Halted,
    Heard,
    Kill,
    Start,
    Tick,
)

PULSE_S = 0.25
UP = {"rollout": "READY", "receiver": "READY", "learner": "READY"}


class World:
    """Names instead of services.

    Attributes:
        taken: The effects so far. running: Who has a process. states, done: What each reports.
    """

    def __init__(self, rules: FleetRules, machine: FleetMachine | None = None, now: float = 0.0) -> None:
        self.now = now
        self.machine = machine or FleetMachine(rules, now)
        self.taken: list[Effect] = []
        self.running: set[str] = set(self.machine.names)
        self.states: dict[str, str] = {}
        self.done: Counter[str] = Counter()
        self.silent: set[str] = set()
        self.halted: set[str] = set()
        self.starts: dict[str, list[float]] = defaultdict(list)

    def tell(self, event: Event) -> None:
        for effect in self.machine.apply(event, self.now):
            self.taken.append(effect)
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Start(name):
                assert name not in self.running, f"{name} was started twice at once"
                self.running.add(name)
                self.starts[name].append(self.now)
                self.states.setdefault(name, "STARTING")
                if name.startswith("rollout."):
                    self.done[name] = 0
            case Kill(name) | End(name):
                assert name in self.running, f"{name} has no process to be ended"
                self.running.discard(name)
                self.silent.discard(name)
                self.halted.discard(name)
                self.states.pop(name, None)
            case Drain(index):
                assert f"rollout.{index}" in self.running, "who drains is there"

    def wait(self, seconds: float) -> None:
        """Let time pass, in pulses in which everybody who lives answers."""
        end = self.now + seconds
        while self.now < end:
            step_s = PULSE_S if seconds < 10 else 1.0
            self.now = min(end, self.now + step_s)
            for name in sorted(self.running - self.silent):
                self.tell(Halted(name) if name in self.halted else self._word_of(name))
            self.tell(Tick())

    def bring_up(self, *names: str) -> None:
        """Let these, or all that run, report that they work."""
        for name in names or tuple(sorted(self.running - self.silent)):
            if name in self.running:
                self.states[name] = UP.get(name.split(".")[0], "READY")
                self.tell(self._word_of(name))

    def _word_of(self, name: str) -> Heard:
        return Heard(name, self.states[name], self.done[name])

    def work(self, *engines: str) -> None:
        """Let these engines that are READY finish an answer, and a learner that trains a step."""
        for name in (*engines, "learner.0"):
            if self.states.get(name) == "READY" and name not in self.silent:
                self.done[name] += 1
        for name in sorted(self.running - self.silent - self.halted):
            self.tell(self._word_of(name))

    def die(self, name: str, reason: str = "was killed", cause: Cause = Cause.DEATH) -> None:
        self.tell(Gone(name, reason, cause))

    def finish_drain(self, index: int) -> None:
        self.states[f"rollout.{index}"] = "ENDED"
        self.tell(Heard(f"rollout.{index}", "ENDED"))
