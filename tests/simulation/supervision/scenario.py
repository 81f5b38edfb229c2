"""A scenario of a supervised run: its shape, and what befalls it when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.simulation.parts.strikes import Kind, Strike, draw_strikes

CORE = ("buffer.0", "learner.0", "publisher.0", "weight_sync.0")
SERVICES = (*CORE, "learner.0", "rollout.*", "rollout.*", "receiver.*")
PAIRS = (
    *("buffer.0|learner.0", "buffer.0|rollout.*", "rollout.*|receiver.*", "learner.0|publisher.0"),
    *("learner.0|supervisor.0", "rollout.*|supervisor.0", "buffer.0|supervisor.0", "weight_sync.0|rollout.*"),
)
KINDS = {
    "die": Kind(SERVICES),
    "pair": Kind(PAIRS),
    "error": Kind(SERVICES),
    "hang": Kind(SERVICES),
    "halt": Kind(SERVICES),
    "sulk": Kind(SERVICES, seconds=(1.0, 15.0)),
    "stuck": Kind(SERVICES),
    "curse": Kind(SERVICES, seconds=(0.1, 8.0), amount=(1.0, 7.0)),
    "slow": Kind(SERVICES, seconds=(3.0, 30.0)),
    "supervisor": Kind(("supervisor.0",), amount=(0.0, 60.0)),
    "scale": Kind(("",), amount=(0.0, 5.0)),
    "drain": Kind(("rollout.*",)),
    "pause": Kind(("",), seconds=(2.0, 20.0)),
    "checkpoint": Kind(("", "learner.0", "learner.0", "supervisor.0"), seconds=(0.0, 3.0)),
    "stop": Kind(("", "learner.0", "supervisor.0", "supervisor.0"), seconds=(0.0, 3.0)),
    "full": Kind(("",), seconds=(1.0, 12.0)),
}
"""After `checkpoint` and `stop`, which an operator asks for, the target dies so many seconds later. `curse`:
the next `amount` lives end after `seconds`. The others are told by their names; see `play`."""
CLASSES: dict[str, tuple[str, ...]] = {
    "general": tuple(kind for kind in KINDS if kind not in ("curse", "stop")),
    "calm": (),
    "deaths": ("die", "die", "error"),
    "two_deaths": ("pair",),
    "silence": ("hang", "halt", "sulk"),
    "stuck_start": ("stuck", "stuck", "die"),
    "successor": ("supervisor", "supervisor", "pair", "die", "scale", "checkpoint:supervisor.0"),
    "scaled": ("scale", "scale", "drain", "die:rollout.*", "slow:rollout.*"),
    "standby": ("die:rollout.*", "error:rollout.*", "die:receiver.*", "supervisor", "halt:rollout.*"),
    "paused": ("pause", "pause", "die:learner.0", "die:buffer.0", "supervisor"),
    "checkpoints": ("checkpoint:learner.0", "checkpoint:learner.0", "die:learner.0", "supervisor"),
    "stopped": ("stop", "slow", "stuck", "supervisor", "die"),
    "crash_loop": ("curse", "curse", "die"),
    "full_disk": ("full", "full", "die", "scale"),
}
STRETCH = 4.0
"""Faults begin so many times later than in the other scopes: services take seconds to start."""


@dataclass(frozen=True)
class Scenario:
    """See the module.

    Attributes:
        standby: Replicas that stand by.
        step_s, save_s: Seconds of a step of the learner, and of a checkpoint.
    """

    seed: int
    faults: str
    replicas: int
    standby: int
    steps: int
    step_s: float
    save_s: float
    checkpoint_every: int
    preempts: float
    strikes: tuple[Strike, ...]

    @property
    def calm_at(self) -> float:
        """Return when the last fault is over."""
        return max((strike.ends_at for strike in self.strikes), default=25.0) + 5.0

    def describe(self) -> list[str]:
        """Return lines for a reader."""
        shape = (
            f"{self.replicas} replicas and {self.standby} that stand by, {self.steps} steps of "
            f"{self.step_s:.1f} s, a checkpoint every {self.checkpoint_every} in {self.save_s:.1f} s"
        )
        return [shape, *map(str, self.strikes)]


def draw_scenario(seed: int, faults: str) -> Scenario:
    """Return what a seed stands for in a class of faults."""
    dice = random.Random(f"supervision/{faults}/{seed}")
    replicas, aims = dice.randint(1, 3), CLASSES[faults]
    drawn = draw_strikes(dice, KINDS, aims, dice.randint(1, 6) if aims else 0, replicas)
    return Scenario(
        seed=seed,
        faults=faults,
        replicas=replicas,
        standby=1 if faults == "standby" else dice.choice((0, 0, 1)),
        steps=dice.choice((8, 30, 1_000_000, 1_000_000)),
        step_s=dice.uniform(0.3, 2.0),
        save_s=dice.uniform(0.1, 1.5),
        checkpoint_every=dice.choice((2, 5, 1_000_000)),
        preempts=dice.choice((0.0, 0.02)),
        strikes=tuple(replace(one, at=one.at * STRETCH) for one in drawn),
    )
