"""A scenario of weight sync: the shape of its world, and what befalls it when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.parts.strikes import Kind, Strike, draw_strikes

SERVICES = ("weight_sync.0", "publisher.0", "learner.0", "receiver.*", "rollout.*")
LINKS = ("receiver.*|weight_sync.0", "publisher.0|weight_sync.0", "receiver.*|publisher.0")
KINDS = {
    "kill": Kind(SERVICES, amount=(0, 40)),
    "ambush": Kind(SERVICES, amount=(0, 6)),
    "stop": Kind(SERVICES, seconds=(0.3, 9.0)),
    "twin": Kind(SERVICES, seconds=(2.0, 12.0), amount=(0.2, 6.0)),
    "lost": Kind(("weight_sync.0",), seconds=(0.2, 3.0)),
    "snare": Kind(SERVICES, seconds=(2.0, 12.0), amount=(0, 6)),
    "part": Kind((*LINKS, "learner.0|publisher.0"), seconds=(0.3, 9.0)),
    "cut": Kind(SERVICES, amount=(0.3, 1.0)),
    "slow": Kind(("",), seconds=(1.0, 6.0), amount=(0.05, 2.0)),
    "garble": Kind(("receiver.*",), seconds=(0.5, 5.0), amount=(0.05, 0.5)),
    "refuse": Kind(("rollout.*",)),
    "intrude": Kind(("weight_sync.0", "publisher.0", "receiver.*")),
    "swell": Kind(("weight_sync.0", "publisher.0", "receiver.*")),
    "join": Kind(("",)),
    "leave": Kind(("rollout.*",)),
    "pin": Kind(("rollout.*",), seconds=(0.5, 4.0)),
}
GENERAL = (
    *("kill", "kill", "ambush", "ambush", "stop", "stop", "twin", "snare", "part", "cut", "slow", "garble"),
    *("refuse", "join", "leave", "pin", "intrude", "swell"),
)
CLASSES: dict[str, tuple[str, ...]] = {
    "general": GENERAL,
    "calm": (),
    "kill_receiver": ("ambush:receiver.*", "kill:receiver.*"),
    "kill_publisher": ("ambush:publisher.0", "kill:publisher.0"),
    "kill_coordinator": ("ambush:weight_sync.0", "kill:weight_sync.0"),
    "kill_learner": ("ambush:learner.0", "kill:learner.0", "twin:learner.0", "snare:learner.0"),
    "kill_replica": ("kill:rollout.*", "ambush:rollout.*", "refuse"),
    "zombie": ("twin", "twin:weight_sync.0", "twin:learner.0", "twin:rollout.*", "snare", "snare:learner.0"),
    "lost": ("lost", "cut", "stop:receiver.*", "kill:publisher.0"),
    "silent": ("stop",),
    "garbled": ("garble",),
    "partition": ("part",),
    "late_joiner": ("join", "join", "leave", "ambush:publisher.0", "stop:receiver.*"),
    "delta": ("ambush:receiver.*", "ambush:publisher.0", "garble", "cut", "join"),
    "pinned": ("pin", "pin", "pin", "kill:rollout.*", "kill:receiver.*", "kill:receiver.*", "twin:rollout.*"),
    "refusing": ("refuse", "refuse", "slow", "slow", "cut:rollout.*"),
    "hostile": ("intrude", "intrude", "swell", "slow"),
    "broken_lines": ("cut", "slow"),
    "striped": (
        *("ambush:publisher.0", "ambush:publisher.1", "ambush:publisher.1", "kill:publisher.1"),
        *("kill:publisher.0", "stop:publisher.1", "twin:publisher.1", "cut:publisher.1", "garble"),
        *("ambush:receiver.*", "kill:receiver.*", "stop:receiver.*", "join", "ambush:learner.0"),
        *("kill:learner.0", "ambush:weight_sync.0", "kill:weight_sync.0"),
    ),
    "shared": (
        *(
            "ambush:receiver.*",
            "ambush:receiver.*",
            "kill:receiver.*",
            "kill:publisher.0",
            "ambush:publisher.0",
        ),
        *(
            "kill:rollout.*",
            "twin:rollout.*",
            "stop:receiver.*",
            "twin:receiver.*",
            "refuse",
            "garble",
            "join",
        ),
    ),
}
ROOMS = ("apart", "apart", "pairs", "one")
"""Ways to place receivers: each on a node of its own, two on each, or all on the publisher's."""
BLIND_SHARE = 0.15
STRIPED = "striped"


@dataclass(frozen=True)
class Scenario:
    """See the module.

    Attributes:
        every_s: Seconds of a learner's step.
        preempts: Share of the calls of a runtime at which another thread may run.
        rooms: Which processes see the same shared memory, see `ROOMS`.
        blind: Receivers that cannot map what they seem to see.
        stripes: Of a version; there are as many publishers.
    """

    seed: int
    replicas: int
    versions: int
    every_s: float
    bytes_per_s: float
    deadline_s: float
    parallelism: int
    uses_delta: bool
    preempts: float
    strikes: tuple[Strike, ...]
    rooms: str = "apart"
    blind: tuple[str, ...] = ()
    stripes: int = 1

    def node_of(self, name: str) -> str:
        """Return the mark of the node of a service."""
        kind, _, index = name.partition(".")
        if kind == "publisher" or self.rooms == "one":
            return "node"
        return f"host.{int(index) // 2}" if self.rooms == "pairs" else f"host.{index}"

    @property
    def calm_at(self) -> float:
        """Return when the last fault is over."""
        return max((strike.ends_at for strike in self.strikes), default=0.0)

    def describe(self) -> list[str]:
        """Return lines for a reader."""
        shape = (
            f"seed {self.seed}: {self.replicas} replicas, {self.versions} versions, "
            f"one in {self.every_s:.2f} s, {self.bytes_per_s:.0f} bytes per s, "
            f"deadline {self.deadline_s:.1f} s, parallelism {self.parallelism}, preempts {self.preempts}"
            f"{', delta' if self.uses_delta else ''}, rooms {self.rooms}, blind {self.blind}"
            f"{f', {self.stripes} stripes' if self.stripes > 1 else ''}"
        )
        return [shape, *map(str, self.strikes)]


def draw_scenario(seed: int, faults: str) -> Scenario:
    """Return what a seed stands for in a class of faults."""
    dice = random.Random(f"sync/{faults}/{seed}")
    replicas, aims, more = dice.randint(1, 3), CLASSES[faults], random.Random(f"rooms/{faults}/{seed}")
    is_shared = faults == "shared"
    num = dice.randint(1, 8) if aims else 0
    return Scenario(
        seed=seed,
        replicas=replicas + is_shared,
        versions=dice.randint(3, 7),
        every_s=dice.uniform(0.5, 2.0),
        bytes_per_s=dice.choice((4_000.0, 12_000.0, 60_000.0)),
        deadline_s=dice.uniform(4.0, 8.0),
        parallelism=dice.randint(1, 2),
        uses_delta=faults == "delta" or dice.random() < 0.25,
        preempts=dice.choice((0.0, 0.0, 0.02, 0.2)),
        strikes=draw_strikes(dice, KINDS, aims, num, replicas + is_shared),
        rooms=more.choice(ROOMS[2:] if is_shared else ROOMS),
        blind=tuple(f"receiver.{index}" for index in range(replicas) if more.random() < BLIND_SHARE),
        stripes=more.choice((2, 2, 3)) if faults == STRIPED else 1,
    )
