"""One cell of the comparison: a rule, a distribution of lengths and a bound, over several seeds.

Throws the dice; everything else in this room is handed its lengths.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import mean

from research.policies.ledger_rule import LedgerRule
from research.policies.lengths import least_lag, length_of
from research.policies.queue import Queue
from research.policies.rules import AdmissionOnly, Blocking, DropAtConsumption, Rule
from research.policies.tally import Figures, Tally
from research.policies.work import TOKENS_PER_STEP, Shape

GENERATION_LOAD = 1.15
"""Groups that the slots can sample per group that the learner can train."""

RULES: dict[str, Callable[[Shape], Rule]] = {
    "mask": lambda shape: LedgerRule(shape, "mask"),
    "drop": lambda shape: LedgerRule(shape, "drop"),
    "wait": lambda shape: LedgerRule(shape, "wait"),
    "areal": AdmissionOnly,
    "prime_rl": DropAtConsumption,
    "blocking": Blocking,
}


@dataclass(frozen=True)
class Cell:
    """Setting of one simulation.

    Attributes:
        rule: A name of `RULES`.
        sigma: Of the log-normal lengths.
        max_lag: The bound.
        batches_in_flight: Slots, in batches. The mean length grows with it, so that the slots always
            sample `GENERATION_LOAD` times what the learner trains.
    """

    rule: str
    sigma: float
    max_lag: int
    batches_in_flight: float
    ready_batches: int = 1

    @property
    def mean_steps(self) -> float:
        """Mean length of a group, in learner steps."""
        return self.batches_in_flight / GENERATION_LOAD

    @property
    def least_lag(self) -> float:
        """The lowest mean lag that a rule can have here without a bias of length."""
        return least_lag(self.sigma, self.mean_steps, self.max_lag)

    @property
    def name(self) -> str:
        return f"{self.rule}/{self.sigma:g}/{self.max_lag}/{self.batches_in_flight:g}"


@dataclass(frozen=True)
class Sizes:
    """Length of a cell: a warm-up and a window, both in steps, once per seed."""

    groups_per_step: int = 64
    warm_up_steps: int = 80
    window_steps: int = 160
    num_seeds: int = 2


def draw_lengths(seed: int, sigma: float, mean_tokens: float) -> Iterator[int]:
    """Yield log-normal lengths in tokens, for ever."""
    dice = random.Random(seed)
    while True:
        yield max(1, round(length_of(dice.gauss(), sigma, mean_tokens)))


def run_cell(cell: Cell, sizes: Sizes) -> Figures:
    """Simulate a cell; return the means over the seeds. The lengths of a seed are the same for every rule."""
    shape = Shape(
        groups_per_step=sizes.groups_per_step,
        slots=round(cell.batches_in_flight * sizes.groups_per_step),
        max_lag=cell.max_lag,
        ready_batches=cell.ready_batches,
    )
    found = []
    for seed in range(sizes.num_seeds):
        tally = Tally(sizes.warm_up_steps, sizes.warm_up_steps + sizes.window_steps)
        lengths = draw_lengths(seed, cell.sigma, cell.mean_steps * TOKENS_PER_STEP)
        found.append(Queue(shape, RULES[cell.rule](shape), lengths, tally).run())
    names = found[0].as_values()
    return replace(found[0], **{name: mean(one.as_values()[name] for one in found) for name in names})
