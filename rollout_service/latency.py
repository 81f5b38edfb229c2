"""Extra waiting time per trajectory, for benchmarks: a stand-in for slow tools and long tails."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from asyncrl.errors import ConfigError


@dataclass(frozen=True)
class Latency:
    """Log-normal waiting times.

    Attributes:
        sigma: Standard deviation of the logarithm; 0 makes all waits equal.
        median_s: Half of the waits are shorter.
    """

    sigma: float
    median_s: float

    def draw_s(self, seed: int) -> float:
        """Return the wait that belongs to `seed`."""
        return self.median_s * math.exp(self.sigma * random.Random(seed).gauss(0.0, 1.0))


def parse_latency(text: str | None) -> Latency | None:
    """Return what `rollout.latency` says: `lognormal:<sigma>:<median seconds>`, or None.

    Raises:
        ConfigError: It has another form.
    """
    if text is None:
        return None
    try:
        kind, sigma, median_s = text.split(":")
        latency = Latency(float(sigma), float(median_s))
    except ValueError:
        kind, latency = "", Latency(0.0, 0.0)
    if kind != "lognormal" or not 0 <= latency.sigma < 10 or not 0 < latency.median_s < math.inf:
        raise ConfigError(f"rollout.latency '{text}' cannot be read", hint="For example lognormal:1.0:0.05")
    return latency
