"""Scenario of a seed: the shape of a run, its faults and their times.

Everything is drawn before the run begins, so a scenario can be printed, and a failing one cut down by hand.
Every fault ends: from `calm_at` on nothing disturbs the run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

NUM_HELD_OUT = 5
"""Prompts of an evaluation."""
FIRST_S, LAST_S = 1.0, 15.0
"""In between faults begin."""
KILLABLE = ("buffer.0", "learner.0", "publisher.0", "weight_sync.0", "rollout.0", "receiver.0", "supervisor")
PARTED = ("learner.0", "publisher.0", "weight_sync.0", "rollout.0", "rollout.1", "receiver.0", "receiver.1")
WEATHERS = ("delay", "duplicate", "reorder", "lose", "garble")
AMBUSH = "ambush"
AMBUSHED = (
    "rollout",
    "receiver",
    "pair",
    "ghost",
    "ghost",
    "buffer.0",
    "weight_sync.0",
    "learner.0",
    "publisher.0",
)
"""Who is killed at a moment of an evaluation; of a replica: the one that evaluates. `pair`: its receiver, and
a moment later itself. `ghost`: itself, says the launcher, but its process lives on for some seconds."""
KINDS = {
    "kill": 6.0,
    "stop": 3.0,
    "twin": 3.0,
    "part": 3.0,
    "slow": 2.0,
    "weather": 6.0,
    "journal away": 1.5,
    "damage payload": 1.0,
    "damage checkpoint": 0.7,
    "power cut": 1.5,
    "scale": 1.5,
    "leave": 1.0,
}
"""Faults, and how likely each is. `twin`: the supervisor cannot reach a process and starts another one; of
the `node`, which has learner and publisher, others of both."""


@dataclass(frozen=True)
class Strike:
    """One fault: `kind` befalls `target` at `at` for `seconds`; `amount` is a share, a factor or a number."""

    at: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.at:6.2f} s  {self.kind}", self.target]
        parts += [f"for {self.seconds:.2f} s"] if self.seconds else []
        parts += [f"by {self.amount:.2g}"] if self.amount else []
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Scenario:
    """See the module.

    Attributes:
        rollbacks: Steps at which the guard goes back. failing_loads: Of each engine's life.
        evaluate_every: Steps, 0 for never. unusable: The held-out prompt without a usable answer, or -1.
    """

    seed: int
    replicas: int
    groups_per_step: int
    group_size: int
    max_groups: int
    max_lag: int
    ready_batches: int
    policy: str
    num_steps: int
    mean_tokens: int
    step_s: float
    checkpoint_every: int
    parallelism: int
    is_always_synced: bool
    rollbacks: tuple[int, ...]
    is_forking: bool
    is_streaming: bool
    failing_loads: tuple[int, ...]
    memory_batches: int
    evaluate_every: int
    evaluation_parts: int
    unusable: int
    strikes: tuple[Strike, ...]

    @property
    def calm_at(self) -> float:
        """When the last fault is over, virtual seconds."""
        return max((strike.at + strike.seconds for strike in self.strikes), default=0.0)

    def without(self, index: int) -> Scenario:
        """Return the scenario less one strike."""
        return replace(self, strikes=(*self.strikes[:index], *self.strikes[index + 1 :]))

    def describe(self) -> list[str]:
        """Return lines for a reader."""
        fsync = "always" if self.is_always_synced else "everysec"
        shape = (
            f"seed {self.seed}: {self.replicas} replicas of {self.max_groups} groups, batches of "
            f"{self.groups_per_step} x {self.group_size}, max_lag {self.max_lag} ({self.policy}), "
            f"{self.num_steps} steps of {self.step_s:.2f} s, fsync {fsync}"
            f"{', streaming' if self.is_streaming else ''}"
            f"{self._describe_evaluations()}"
        )
        return [shape, *(str(strike) for strike in self.strikes)]

    def _describe_evaluations(self) -> str:
        if not self.evaluate_every:
            return ""
        unusable = f", prompt {self.unusable} without a usable answer" if self.unusable >= 0 else ""
        return f", evaluated every {self.evaluate_every} steps in {self.evaluation_parts} parts{unusable}"


def draw_scenario(seed: int) -> Scenario:
    """Return what `seed` stands for."""
    dice = random.Random(f"scenario/{seed}")
    replicas = dice.randint(1, 3)
    num_steps = dice.randint(5, 8)
    has_rollback = dice.random() < 0.25
    evaluations = random.Random(f"evaluations/{seed}")
    scenario = Scenario(
        seed=seed,
        replicas=replicas,
        groups_per_step=dice.randint(2, 4),
        group_size=dice.randint(1, 2),
        max_groups=dice.randint(1, 4),
        max_lag=dice.choice((0, 1, 1, 2, 3)),
        ready_batches=dice.choice((1, 1, 2)),
        policy=dice.choice(("mask", "mask", "drop", "wait")),
        num_steps=num_steps,
        mean_tokens=dice.randint(3, 10),
        step_s=dice.uniform(0.2, 1.2),
        checkpoint_every=dice.randint(1, 3),
        parallelism=dice.randint(1, 2),
        is_always_synced=dice.random() < 0.5,
        rollbacks=(dice.randrange(1, num_steps),) if has_rollback else (),
        is_forking=dice.random() < 0.5,
        is_streaming=random.Random(f"streaming/{seed}").random() < 0.3,
        failing_loads=(dice.randint(1, 4),) if dice.random() < 0.15 else (),
        memory_batches=dice.randint(2, 4),
        evaluate_every=evaluations.choice((0, 1, 1, 2, 3)),
        evaluation_parts=evaluations.randint(1, 3),
        unusable=evaluations.randrange(NUM_HELD_OUT) if evaluations.random() < 0.1 else -1,
        strikes=(),
    )
    strikes = [_draw_strike(dice, replicas) for _ in range(dice.randint(1, 7))]
    if scenario.evaluate_every:
        strikes += [_draw_ambush(evaluations) for _ in range(evaluations.randint(0, 2))]
    return replace(scenario, strikes=tuple(sorted(strikes, key=lambda strike: strike.at)))


def _draw_strike(dice: random.Random, replicas: int) -> Strike:
    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    at = dice.uniform(FIRST_S, LAST_S)
    if kind == "kill":
        return Strike(at, kind, _pick(dice, KILLABLE, replicas))
    if kind == "stop":
        return Strike(at, kind, _pick(dice, KILLABLE[:-1], replicas), dice.uniform(0.3, 8.0))
    if kind == "twin":
        target = _pick(dice, ("learner.0", "node", "weight_sync.0", "rollout.0"), replicas)
        return Strike(at, kind, target, dice.uniform(6.0, 14.0))
    if kind == "part":
        one = _pick(dice, PARTED[:1] + PARTED, replicas)
        other = _pick(dice, ("buffer.0", "weight_sync.0", "publisher.0"), replicas)
        return Strike(at, kind, f"{one}|{other}", dice.uniform(0.5, 9.0))
    if kind == "slow":
        return Strike(
            at, kind, _pick(dice, KILLABLE[:-1], replicas), dice.uniform(2.0, 10.0), dice.uniform(2, 12)
        )
    if kind == "weather":
        return Strike(at, dice.choice(WEATHERS), "", dice.uniform(1.0, 10.0), dice.uniform(0.05, 0.4))
    if kind in ("journal away", "power cut"):
        return Strike(at, kind, "", dice.uniform(0.5, 5.0))
    if kind == "scale":
        return Strike(at, kind, "", 0.0, dice.randint(1, 4))
    if kind == "leave":
        return Strike(at, kind, "", 0.0, dice.randrange(replicas))
    return Strike(at, kind)


def _draw_ambush(dice: random.Random) -> Strike:
    """`amount`: at which moment of an evaluation, counted from `at` on; `seconds`: so long it waits."""
    return Strike(
        dice.uniform(0.0, LAST_S), AMBUSH, dice.choice(AMBUSHED), dice.uniform(2.0, 10.0), dice.randint(1, 9)
    )


def _pick(dice: random.Random, services: tuple[str, ...], replicas: int) -> str:
    """Return one of the services, any replica for a replica."""
    kind, _, index = dice.choice(services).partition(".")
    if kind in ("rollout", "receiver"):
        return f"{kind}.{dice.randrange(replicas)}"
    return f"{kind}.{index}" if index else kind
