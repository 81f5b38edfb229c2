"""Faults that lie in wait: they kill at a moment of an evaluation, not at a time.

Owns the traps. A trap counts the moments that replicas pass from its time on and strikes at its number, or
never: an evaluation is short, and kills at random times seldom meet one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.planner.faults.kernel.process import Process
from asyncrl.planner.faults.scenario import Strike
from asyncrl.planner.world import World

PAIR_S = 1.0
"""The replica of a pair dies up to so much after its receiver."""

GHOST_S = 8.0
"""A replica that is thought dead lives on for up to so much, beside its successor and that one's receiver,
whom it calls too. It dies earlier if it pins that receiver."""


@dataclass
class _Trap:
    target: str
    until: float
    num_left: int


class Ambush:
    """See the module.

    Args:
        kill: Ends the process under a service's name, if there is one.
        forsake: Makes the supervisor believe it dead, which lives on for so many seconds.
    """

    def __init__(
        self, world: World, seed: int, kill: Callable[[str], None], forsake: Callable[[str, float], None]
    ) -> None:
        self._world, self._kill, self._forsake = world, kill, forsake
        self._dice = random.Random(f"ambush/{seed}")
        self._traps: list[_Trap] = []

    def lay(self, strike: Strike) -> None:
        """Wait for a moment from here on, for as long as the strike lasts."""
        self._traps.append(_Trap(strike.target, self._world.now + strike.seconds, int(strike.amount)))

    def pass_point(self, process: Process, point: str) -> None:
        """A replica has come to a moment of an evaluation."""
        self._traps = [one for one in self._traps if self._world.now < one.until]
        for trap in list(self._traps):
            trap.num_left -= 1
            if trap.num_left <= 0 and (trap.target != "ghost" or point == "ordered"):
                self._traps.remove(trap)
                self._spring(trap.target, process.service.partition(".")[2])

    def _spring(self, target: str, index: str) -> None:
        if target == "pair":
            self._world.after(0.0, self._kill, f"receiver.{index}")
            self._world.after(self._dice.uniform(0.0, PAIR_S), self._kill, f"rollout.{index}")
        elif target == "ghost":
            if self._dice.random() < 0.5:
                self._world.after(0.0, self._kill, f"receiver.{index}")
            lives_on_s = self._dice.uniform(0.0, self._dice.choice((PAIR_S, GHOST_S)))
            self._world.after(0.0, self._forsake, f"rollout.{index}", lives_on_s)
        else:
            name = f"{target}.{index}" if target in ("rollout", "receiver") else target
            self._world.after(0.0, self._kill, name)
