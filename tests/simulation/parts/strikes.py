"""Faults of a scenario, and the classes of scenarios that are aimed at one of them.

Everything is drawn before a world begins, so a scenario can be printed. Every fault ends.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_S, LAST_S = 0.5, 9.0
"""In between faults begin."""


@dataclass(frozen=True)
class Strike:
    """One fault: `kind` befalls `target` at `at` for `seconds`; `amount` is a share or a number.

    Kinds: `kill` at the `amount`-th call of the runtime from then on; `ambush` at the `amount`-th fault
    point; `stop`, as SIGSTOP; `twin`: thought dead, it goes on after the pause beside its successor; `lost`:
    a twin that never goes on, and never ends; `snare`: a twin at the `amount`-th fault point; `answering`: a
    kill or a twin as it has answered an evaluation; `part`: nothing passes between `one|other`; `cut`:
    connections break; `slow`: messages are late; `intrude`: somebody sends it what no client sends; `swell`:
    its memory grows beyond the bound; `garble`: bits flip in weights on their way; `refuse`: the engine's
    next load fails; `away`, `damage`, `power`: the journal's disk takes nothing, a payload rots, the power is
    cut; `rot`: a checkpoint does; `pause`: an operator pauses the run; `join`, `leave`, `pin`: a replica
    comes, goes, evaluates.
    """

    at: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:6.2f} s  {self.kind} {self.target} for {self.seconds:.2f} s, {self.amount:.2g}"

    @property
    def ends_at(self) -> float:
        """Return when the fault is over."""
        return self.at + self.seconds


@dataclass(frozen=True)
class Kind:
    """The range that a fault is drawn from: its targets, its duration, its amount."""

    targets: Sequence[str]
    seconds: tuple[float, float] = (0.0, 0.0)
    amount: tuple[float, float] = (0.0, 0.0)


def draw_strike(dice: random.Random, kind: str, drawn: Kind, replicas: int) -> Strike:
    """Return one fault; `*` in a target is any replica's number."""
    target = dice.choice(list(drawn.targets)).replace("*", str(dice.randrange(replicas)))
    at = dice.uniform(FIRST_S, LAST_S)
    amount = dice.uniform(*drawn.amount)
    if kind in ("kill", "ambush", "snare", "answering"):
        amount = float(int(amount))
    return Strike(at, kind, target, dice.uniform(*drawn.seconds), amount)


def draw_strikes(
    dice: random.Random, kinds: Mapping[str, Kind], aims: Sequence[str], num: int, replicas: int
) -> tuple[Strike, ...]:
    """Return `num` faults of the kinds in `aims`, by their times.

    An aim may name its target: `kill:receiver.*`.
    """
    strikes = []
    for _ in range(num):
        kind, _, target = dice.choice(list(aims)).partition(":")
        drawn = kinds[kind]
        if target:
            drawn = Kind((target,), drawn.seconds, drawn.amount)
        strikes.append(draw_strike(dice, kind, drawn, replicas))
    return tuple(sorted(strikes, key=lambda strike: strike.at))
