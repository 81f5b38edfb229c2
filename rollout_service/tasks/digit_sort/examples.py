"""Digit lists: the prompts of the task, for training and held out (pure but for the given random source)."""

from __future__ import annotations

import random
from dataclasses import dataclass

MIN_DIGITS, MAX_DIGITS = 3, 5

Digits = tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Lists for training and lists held out; no held-out list is among the training ones."""

    train: list[Digits]
    held_out: list[Digits]


def draw_digits(source: random.Random) -> Digits:
    """Return one list of random length and random digits."""
    return tuple(source.randrange(10) for _ in range(source.randint(MIN_DIGITS, MAX_DIGITS)))


def draw_split(seed: int, num_train: int, num_held_out: int) -> Split:
    """Return disjoint lists; the held-out ones are all different, training ones may repeat."""
    source = random.Random(seed)
    held_out: dict[Digits, None] = {}
    while len(held_out) < num_held_out:
        held_out[draw_digits(source)] = None
    train: list[Digits] = []
    while len(train) < num_train:
        digits = draw_digits(source)
        if digits not in held_out:
            train.append(digits)
    return Split(train, list(held_out))
