"""Memory growth of this process, for a server that must stay within a bound.

libzmq keeps the parts of a message until its last one is there, without a limit on their number:
300 MiB of parts that never ended took 301 MiB. Closing the connections frees them (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_FIELD = "RssAnon:"
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
GROWTH_BYTES = 4 << 20
"""Between two looks that are no growth: a service allocates a little all the time."""


def resident_bytes() -> int:
    """Return the memory that this process alone holds, without files and shared segments; 0 if unknown."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0  # not Linux
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(_FIELD)), 0)


class MemoryGuard:
    """Says when the process has grown by more than `allowance_bytes` over its smallest size since `reset`.

    Args:
        measure: Returns the memory that the process holds, in bytes.

    Attributes:
        pause_s: Until the next look: short while the process grows, long while it does not. Nothing tells a
            server that parts of a message have come, so someone must look.
    """

    def __init__(self, allowance_bytes: int, measure: Callable[[], int] = resident_bytes) -> None:
        self.allowance_bytes, self._measure = allowance_bytes, measure
        self._last = self._smallest = measure()
        self.pause_s = SHORTEST_PAUSE_S

    def is_passed(self) -> bool:
        """Look."""
        found = self._measure()
        is_growing = found - self._last > GROWTH_BYTES
        self.pause_s = SHORTEST_PAUSE_S if is_growing else min(LONGEST_PAUSE_S, 2 * self.pause_s)
        self._last, self._smallest = found, min(self._smallest, found)
        return found - self._smallest > self.allowance_bytes

    def reset(self) -> None:
        """Measure from here on."""
        self._last = self._smallest = self._measure()
        self.pause_s = SHORTEST_PAUSE_S
