"""A network that delays, doubles, swaps, loses and garbles messages, and parts services.

Owns its dice. Invariant: outside of every window a message arrives once, within `MAX_LATENCY_S`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from asyncrl.planner.world import Message

MIN_LATENCY_S, MAX_LATENCY_S = 0.0005, 0.01
LATE_S = 3.0
"""A delayed message is later by up to so much."""


@dataclass(frozen=True)
class Window:
    """While it lasts, `kind` befalls a share of the messages; `ends`: of a parting, whom it parts."""

    kind: str
    start: float
    end: float
    share: float = 0.0
    ends: tuple[str, str] = ("", "")


class FaultyNetwork:
    """See the module; windows may be added while it runs."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(f"network/{seed}")
        self._windows: list[Window] = []

    def add(self, window: Window) -> None:
        """Let something befall messages."""
        self._windows.append(window)

    def deliver(self, src: str, dst: str, message: Message, now: float) -> list[float]:
        """Return after how many seconds each copy arrives."""
        dice = self._dice
        delays_s = [dice.uniform(MIN_LATENCY_S, MAX_LATENCY_S)]
        for window in self._windows:
            if not window.start <= now < window.end:
                continue
            if window.kind == "part" and _is_between(window, src, dst):
                # What a connection holds arrives when it heals, if it lives so long.
                delays_s = [] if dice.random() < 0.5 else [one + window.end - now for one in delays_s]
            elif window.kind != "part" and dice.random() < window.share:
                delays_s = self._befall(window.kind, delays_s)
        return delays_s

    def _befall(self, kind: str, delays_s: list[float]) -> list[float]:
        dice = self._dice
        if kind == "delay":
            return [one + dice.uniform(0.0, LATE_S) for one in delays_s]
        if kind == "reorder":
            return [one + dice.uniform(0.0, 0.3) for one in delays_s]
        if kind == "duplicate":
            return delays_s + [one + dice.uniform(0.0, LATE_S) for one in delays_s]
        return [] if kind == "lose" else delays_s

    def can_reach(self, one: str, other: str, now: float) -> bool:
        """Tell whether no parting lies between two services."""
        return not any(
            window.kind == "part" and window.start <= now < window.end and _is_between(window, one, other)
            for window in self._windows
        )

    def garble(self, bucket: bytes, now: float) -> bytes:
        """Return what arrives of a bucket."""
        for window in self._windows:
            is_on = window.kind == "garble" and window.start <= now < window.end
            if is_on and self._dice.random() < window.share:
                at = self._dice.randrange(len(bucket))
                return bucket[:at] + bytes([bucket[at] ^ 1]) + bucket[at + 1 :]
        return bucket


def _is_between(window: Window, src: str, dst: str) -> bool:
    ends = (src.partition("/")[0], dst.partition("/")[0])
    return ends in (window.ends, window.ends[::-1])
