"""Pairs of factors: the prompts of the task, for training and held out."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollout_service.tasks.tool_product.vocabulary import Factors

MIN_FACTOR, MAX_FACTOR = 10, 99


@dataclass(frozen=True)
class Split:
    """Pairs for training and pairs held out; no held-out pair is among the training ones."""

    train: list[Factors]
    held_out: list[Factors]


def draw_factors(source: random.Random) -> Factors:
    """Return two random two-digit numbers."""
    return source.randint(MIN_FACTOR, MAX_FACTOR), source.randint(MIN_FACTOR, MAX_FACTOR)


def draw_split(seed: int, num_train: int, num_held_out: int) -> Split:
    """Return disjoint pairs; the held-out ones are all different, training ones may repeat."""
    source = random.Random(seed)
    held_out: dict[Factors, None] = {}
    while len(held_out) < num_held_out:
        held_out[draw_factors(source)] = None
    train: list[Factors] = []
    while len(train) < num_train:
        factors = draw_factors(source)
        if factors not in held_out:
            train.append(factors)
    return Split(train, list(held_out))
