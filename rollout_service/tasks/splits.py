"""Examples of a built-in task, for training and held out (pure but for the given random source)."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Example = TypeVar("Example", bound=Hashable)


@dataclass(frozen=True)
class Split(Generic[Example]):
    """Examples for training and examples held out; no held-out one is among the training ones."""

    train: list[Example]
    held_out: list[Example]


def draw_disjoint(
    draw: Callable[[random.Random], Example], seed: int, num_train: int, num_held_out: int
) -> Split[Example]:
    """Return disjoint examples; the held-out ones are all different, training ones may repeat."""
    source = random.Random(seed)
    held_out: dict[Example, None] = {}
    while len(held_out) < num_held_out:
        held_out[draw(source)] = None
    train: list[Example] = []
    while len(train) < num_train:
        example = draw(source)
        if example not in held_out:
            train.append(example)
    return Split(train, list(held_out))
