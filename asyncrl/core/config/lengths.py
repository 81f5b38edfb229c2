"""Forced response lengths, for benchmarks: the skew that a tiny model does not have by itself.

A response then has exactly the drawn number of tokens: the end of sequence does not end it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from asyncrl.core.errors import ConfigError


@dataclass(frozen=True)
class Lengths:
    """Log-normal response lengths.

    Attributes:
        sigma: Standard deviation of the logarithm; 0 makes all lengths equal.
        median_tokens: Half of the responses are shorter.
    """

    sigma: float
    median_tokens: float

    def draw_tokens(self, seed: int, max_tokens: int) -> int:
        """Return the length that belongs to `seed`, from 1 to `max_tokens`."""
        return self.draw(random.Random(seed), max_tokens)

    def draw(self, dice: random.Random, max_tokens: int) -> int:
        """Return the length that belongs to the seed that `dice` was just given."""
        drawn = self.median_tokens * math.exp(self.sigma * dice.gauss(0.0, 1.0))
        return min(max(1, round(drawn)), max_tokens)


def parse_lengths(text: str | None) -> Lengths | None:
    """Return what `rollout.response_tokens` says: `lognormal:<sigma>:<median tokens>`, or None.

    Raises:
        ConfigError: It has another form.
    """
    if text is None:
        return None
    try:
        kind, sigma, median_tokens = text.split(":")
        lengths = Lengths(float(sigma), float(median_tokens))
    except ValueError:
        kind, lengths = "", Lengths(0.0, 0.0)
    if kind != "lognormal" or not 0 <= lengths.sigma < 10 or not 1 <= lengths.median_tokens < math.inf:
        raise ConfigError(
            f"rollout.response_tokens: '{text}' cannot be read", hint="For example lognormal:1.0:64"
        )
    return lengths
