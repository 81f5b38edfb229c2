"""A scenario of a whole run: its shape, and what befalls it when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.parts.strikes import Kind, draw_strikes
from tests.simulation.sync.scenario import KINDS as SYNC_KINDS
from tests.simulation.sync.scenario import ROOMS
from tests.simulation.sync.scenario import Scenario as SyncScenario

SERVICES = (
    "buffer.0",
    "buffer.0",
    "learner.0",
    "rollout.*",
    "rollout.*",
    "publisher.0",
    "weight_sync.0",
    "receiver.*",
)
LINKS = ("rollout.*|buffer.0", "learner.0|buffer.0", "learner.0|publisher.0", "rollout.*|receiver.*")
KINDS = {
    **SYNC_KINDS,
    "kill": Kind(SERVICES, amount=(0, 40)),
    "ambush": Kind(SERVICES, amount=(0, 12)),
    "stop": Kind(SERVICES, seconds=(0.3, 8.0)),
    "twin": Kind(
        ("learner.0", "rollout.*", "rollout.*", "weight_sync.0"), seconds=(2.0, 12.0), amount=(0.2, 6.0)
    ),
    "snare": Kind(("learner.0", "rollout.*"), seconds=(2.0, 12.0), amount=(0, 12)),
    "answering": Kind(("rollout.*",), seconds=(0.5, 8.0), amount=(0, 2)),
    "part": Kind(LINKS, seconds=(0.3, 8.0)),
    "cut": Kind(SERVICES, amount=(0.3, 1.0)),
    "intrude": Kind(("buffer.0",)),
    "swell": Kind(("buffer.0",)),
    "away": Kind(("",), seconds=(0.3, 5.0)),
    "damage": Kind(("",)),
    "power": Kind(("",)),
    "rot": Kind(("",)),
    "pause": Kind(("",), seconds=(0.5, 4.0)),
}
GENERAL = (
    *("kill", "kill", "ambush", "ambush", "stop", "twin", "snare", "part", "cut", "slow", "garble", "refuse"),
    *("join", "leave", "away", "damage", "intrude", "swell", "power", "pause"),
)
CLASSES: dict[str, tuple[str, ...]] = {
    "general": GENERAL,
    "calm": (),
    "kill_buffer": ("ambush:buffer.0", "kill:buffer.0", "away"),
    "kill_learner": ("ambush:learner.0", "kill:learner.0"),
    "kill_replica": ("ambush:rollout.*", "kill:rollout.*"),
    "zombie_learner": ("twin:learner.0", "snare:learner.0"),
    "zombie_replica": ("twin:rollout.*", "snare:rollout.*", "stop:rollout.*"),
    "silent": ("stop",),
    "broken_lines": ("cut", "slow"),
    "partition": ("part",),
    "drains": (
        "part:rollout.*|buffer.0",
        "leave",
        "leave",
        "join",
        "join",
        "ambush:rollout.*",
        "kill:rollout.*",
        "ambush:buffer.0",
    ),
    "evaluated": (
        "leave",
        "leave",
        "join",
        "join",
        "answering",
        "answering",
        "answering",
        "ambush:rollout.*",
        "kill:rollout.*",
        "twin:rollout.*",
        "kill:receiver.*",
        "stop:rollout.*",
        "slow",
        "slow",
        "ambush:rollout.*",
    ),
    "rollback": ("kill:learner.0", "ambush:learner.0", "stop:rollout.*"),
    "late": ("slow", "slow", "cut:learner.0", "cut:learner.0", "cut:learner.0", "ambush:learner.0"),
    "failing": ("pause", "kill:rollout.*", "leave", "join"),
    "refusing": ("refuse", "refuse", "slow"),
    "rotten": ("rot", "ambush:learner.0", "kill:learner.0"),
    "storage": ("damage", "power", "away", "ambush:learner.0"),
}

PAIRS = tuple(f"{first}{second}" for first in range(10) for second in range(10) if (first + second) % 8 == 0)
"""Stop strings of two digits: now and then one lies across the place where an answer was handed on."""


@dataclass(frozen=True)
class Scenario(SyncScenario):
    """See the module. `versions` and `every_s` are of no account: the learner trains `steps`.

    Attributes:
        step_s: Seconds of a step of the learner.
        lease_s: Of the buffer.
        failing_share: Of the answers that cannot be scored.
        stop: Strings that end an answer.
        rollbacks: Steps at which the guard goes back, the first time that they are trained.
        is_forking: It goes on otherwise then; else it drops a group.
        longest_row: Tokens of a row that the learner still takes.
        wants_best: The checkpoint with the highest score stays besides, if each of them is evaluated.
    """

    steps: int = 4
    step_s: float = 0.5
    groups_per_step: int = 2
    group_size: int = 2
    max_groups: int = 2
    max_lag: int = 1
    policy: str = "mask"
    lease_s: float = 2.0
    tokens_per_s: float = 10.0
    max_tokens: int = 8
    checkpoint_every: int = 1
    evaluate_every: int = 0
    evaluation_parts: int = 1
    failing_share: float = 0.0
    longest_row: int = 1 << 20
    drops_constant: bool = False
    rollbacks: tuple[int, ...] = ()
    is_forking: bool = False
    stop: tuple[str, ...] = ()
    is_streaming: bool = False
    is_always_synced: bool = False
    wants_best: bool = False

    @property
    def keep_best(self) -> int:
        """Return how many checkpoints stay for their scores."""
        every = self.evaluate_every
        return int(self.wants_best and every > 0 and self.checkpoint_every % every == 0)

    def describe(self) -> list[str]:
        """Return lines for a reader."""
        more = (
            f"{self.steps} steps of {self.groups_per_step} x {self.group_size}, max_lag {self.max_lag} "
            f"({self.policy}), leases of {self.lease_s:.1f} s, {self.max_groups} groups per replica, "
            f"{self.tokens_per_s:.0f} tokens per s, a checkpoint every {self.checkpoint_every} steps, "
            f"evaluated every {self.evaluate_every} in {self.evaluation_parts} parts"
            f", {self.failing_share:.0%} of answers fail, rows of {self.longest_row} tokens fit"
            f", goes back at {self.rollbacks}{' with a fork' if self.is_forking else ''}"
            f"{', constant groups are dropped' if self.drops_constant else ''}"
            f"{', streaming' if self.is_streaming else ''}"
            f"{', always synced' if self.is_always_synced else ''}"
            f"{', the best checkpoint stays' if self.keep_best else ''}"
        )
        return [*super().describe()[:1], more, *map(str, self.strikes)]


def draw_scenario(seed: int, faults: str) -> Scenario:
    """Return what a seed stands for in a class of faults."""
    dice = random.Random(f"run/{faults}/{seed}")
    replicas, aims = dice.randint(1, 3), CLASSES[faults]
    group_size, more = dice.randint(1, 2), random.Random(f"more/{faults}/{seed}")
    return Scenario(
        seed=seed,
        replicas=replicas,
        versions=1,
        every_s=1.0,
        bytes_per_s=dice.choice((12_000.0, 60_000.0)),
        deadline_s=dice.uniform(4.0, 8.0),
        parallelism=dice.randint(1, 2),
        uses_delta=dice.random() < 0.2,
        preempts=dice.choice((0.0, 0.0, 0.02)),
        strikes=draw_strikes(dice, KINDS, aims, dice.randint(1, 6) if aims else 0, replicas),
        rooms=random.Random(f"rooms/{faults}/{seed}").choice(ROOMS),
        steps=dice.randint(3, 6),
        step_s=dice.uniform(0.2, 1.0),
        groups_per_step=dice.randint(2, 4),
        group_size=group_size,
        max_groups=dice.randint(1, 4),
        max_lag=dice.choice((0, 1, 1, 2, 3)),
        policy=dice.choice(("mask", "mask", "drop", "wait")),
        lease_s=dice.uniform(1.5, 4.0),
        tokens_per_s=dice.choice((4.0, 10.0, 25.0)),
        max_tokens=dice.randint(4, 10),
        checkpoint_every=dice.randint(1, 3),
        evaluate_every=1 if faults == "evaluated" else dice.choice((0, 0, 1, 2)),
        evaluation_parts=dice.randint(1, 2),
        failing_share=0.2 if faults == "failing" else more.choice((0.0, 0.0, 0.05)),
        longest_row=more.choice((1 << 20, 1 << 20, 16)) if faults in ("failing", "general") else 1 << 20,
        stop=PAIRS if faults == "drains" else more.choice(((), (), ("1", "77"))),
        rollbacks=_draw_rollbacks(more, faults),
        is_forking=more.random() < 0.6,
        drops_constant=group_size > 1 and more.random() < 0.2,
        is_streaming=dice.random() < 0.3,
        is_always_synced=dice.random() < 0.5,
        wants_best=faults in ("rotten", "failing", "late", "drains"),
    )


def _draw_rollbacks(dice: random.Random, faults: str) -> tuple[int, ...]:
    wants = faults in ("rollback", "late") or (faults == "general" and dice.random() < 0.3)
    return tuple(sorted(dice.sample(range(1, 5), dice.randint(1, 2)))) if wants else ()
