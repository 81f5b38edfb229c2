"""Digit lists: the prompts of the task, for training and held out (pure but for the given random source)."""

from __future__ import annotations

import random

from rollout_service.tasks.splits import Split, draw_disjoint

MIN_DIGITS, MAX_DIGITS = 3, 5

Digits = tuple[int, ...]


def draw_digits(source: random.Random) -> Digits:
    """Return one list of random length and random digits."""
    return tuple(source.randrange(10) for _ in range(source.randint(MIN_DIGITS, MAX_DIGITS)))


def draw_split(seed: int, num_train: int, num_held_out: int) -> Split[Digits]:
    """Return disjoint lists; the held-out ones are all different, training ones may repeat."""
    return draw_disjoint(draw_digits, seed, num_train, num_held_out)
