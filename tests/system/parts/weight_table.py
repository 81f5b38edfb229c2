"""The pairwise covering table over all that decides how weights get from a learner into an engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tests.rollout.engine.families import CONFIGS, VOCABULARIES, WIDTHS, Form

Value = str | bool | int
Pair = frozenset[tuple[str, Value]]
FACTORS: dict[str, tuple[Value, ...]] = {
    "vocabulary": VOCABULARIES,
    "width": tuple(range(len(WIDTHS))),
    "family": tuple(CONFIGS),
    "is_tied": (True, False),
    "backend": ("megatron", "fsdp2"),
    "workers": (1, 2),
    "is_in_flight": (True, False),
}
IMPOSSIBLE: tuple[dict[str, Value], ...] = (
    {"family": "qwen2", "width": 3},  # its heads share out the hidden size
    {"vocabulary": 151_936, "width": 1},  # gigabytes for twenty versions
    {"vocabulary": 151_936, "width": 2},
)


@dataclass(frozen=True)
class Row:
    """One combination.

    Attributes:
        backend: The learner that makes the versions.
        workers: Tensor-parallel workers of the engine.
        is_in_flight: Whether requests are under way at every swap.
    """

    form: Form
    backend: str
    workers: int
    is_in_flight: bool

    def __str__(self) -> str:
        flight = "in flight" if self.is_in_flight else "at rest"
        return f"{self.form} {self.backend} tp{self.workers} {flight}"


def pairwise_rows() -> list[Row]:
    """Return rows in which every possible pair of values of two factors occurs."""
    return [
        Row(
            Form(str(one["family"]), bool(one["is_tied"]), int(one["vocabulary"]), WIDTHS[int(one["width"])]),
            str(one["backend"]),
            int(one["workers"]),
            bool(one["is_in_flight"]),
        )
        for one in cover()
    ]


def possible_pairs() -> set[Pair]:
    """Return each pair of values of two factors that may stand in one row."""
    found: set[Pair] = set()
    for (one, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        pairs = (frozenset({(one, a), (other, b)}) for a, b in itertools.product(values, others))
        found |= {pair for pair in pairs if is_possible(dict(pair))}
    return found


def pairs_of(row: dict[str, Value]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def is_possible(row: dict[str, Value]) -> bool:
    return not any(bad.items() <= row.items() for bad in IMPOSSIBLE)


def cover() -> Iterator[dict[str, Value]]:
    """Yield rows until no pair is left: each begins with one that is left and takes in the most others."""
    left = possible_pairs()
    while left:
        row = dict(min(left, key=lambda pair: sorted(map(str, pair))))
        for factor, values in FACTORS.items():
            if factor not in row:
                tries = [row | {factor: value} for value in values if is_possible(row | {factor: value})]
                row = max(tries, key=lambda one: len(pairs_of(one) & left))
        left -= pairs_of(row)
        yield row
