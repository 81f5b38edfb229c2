"""Queueing delay of a request before it was read, without a comparison of clocks (pure).

Each request carries its time of sending by the caller's own clock. The smallest difference between that
and the server's clock is the clocks' offset plus the quickest transit; any time beyond it is queueing delay.
Invariant: `measure_s` never returns more than the true delay, so a caller that is reported as timed out has
timed out. The first request of a connection is taken for the quickest one.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 30.0
"""Offsets older than two of these are forgotten: clocks drift apart, and one that stood still (of a paused
machine) makes requests look old for so long. While nothing is read, nothing is forgotten."""
MAX_CALLERS = 4096
"""Connections remembered; beyond them the one that spoke first is forgotten."""


@dataclass(slots=True)
class _Quickest:
    """The smallest differences, in seconds, of this window and of the one before."""

    began_s: float
    lately_s: float
    before_s: float


class Delays:
    """See the module."""

    def __init__(self) -> None:
        self._callers: dict[bytes, _Quickest] = {}

    def measure_s(self, caller: bytes, sent_s: float, now_s: float) -> float:
        """Return how long a request took beyond the quickest one of its caller, in seconds.

        Args:
            caller: Names the connection.
            sent_s: When it was sent, by the caller's monotonic clock.
            now_s: By ours.
        """
        difference_s = now_s - sent_s
        known = self._callers.get(caller)
        if known is None:
            if len(self._callers) >= MAX_CALLERS:
                del self._callers[next(iter(self._callers))]
            self._callers[caller] = _Quickest(now_s, difference_s, difference_s)
            return 0.0
        if now_s - known.began_s > WINDOW_S:
            known.began_s, known.before_s, known.lately_s = now_s, known.lately_s, difference_s
        known.lately_s = min(known.lately_s, difference_s)
        return difference_s - min(known.lately_s, known.before_s)
