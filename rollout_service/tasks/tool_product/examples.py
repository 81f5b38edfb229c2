"""Pairs of factors: the prompts of the task, for training and held out."""

from __future__ import annotations

import random

from rollout_service.tasks.splits import Split, draw_disjoint
from rollout_service.tasks.tool_product.vocabulary import Factors

MIN_FACTOR, MAX_FACTOR = 10, 99


def draw_factors(source: random.Random) -> Factors:
    """Return two random two-digit numbers."""
    return source.randint(MIN_FACTOR, MAX_FACTOR), source.randint(MIN_FACTOR, MAX_FACTOR)


def draw_split(seed: int, num_train: int, num_held_out: int) -> Split[Factors]:
    """Return disjoint pairs; the held-out ones are all different, training ones may repeat."""
    return draw_disjoint(draw_factors, seed, num_train, num_held_out)
