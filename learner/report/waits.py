"""Waits of rank 0 by cause, and the composition of a step's time.

Invariant: the waits, by cause, the work, by stage, and the rest add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from asyncrl.core.runtime.clock import Clock, SystemClock

BATCH, PAUSED, BUFFER, CHECKPOINT, PUBLISHER = CAUSES = (
    "batch",
    "paused",
    "buffer",
    "checkpoint",
    "publisher",
)
"""A complete batch; the command `unpause`; answers of the buffer, also while it is started again; the
checkpoint before to be written; answers of the publisher."""


class Waits:
    """Seconds by cause. A wait within another one counts for the inner one alone.

    Example:
        with waits.on(BATCH):
            found = client.reserve(step, wait_s)
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._causes: list[str] = []
        self._since = 0.0

    @contextmanager
    def on(self, cause: str) -> Iterator[None]:
        """Book the time of the block on `cause`."""
        self._book()
        self._causes.append(cause)
        try:
            yield
        finally:
            self._book()
            self._causes.pop()

    def take(self) -> dict[str, float]:
        """Return the seconds of every cause since the last call."""
        assert not self._causes, "asked between two waits"
        taken, self._seconds = self._seconds, dict.fromkeys(CAUSES, 0.0)
        return taken

    def _book(self) -> None:
        now = self._clock.now()
        if self._causes:
            self._seconds[self._causes[-1]] += now - self._since
        self._since = now


def describe_time(
    stages: Mapping[str, float], waits: Mapping[str, float], total_s: float
) -> dict[str, float]:
    """Return how a step's time is made up.

    Args:
        stages: `timing_s/<stage>` of the step.
        waits: Seconds by cause.
        total_s: From the end of the step before to the end of this one.
    """
    names = {cause: "timing_s/wait" if cause == BATCH else f"timing_s/wait_{cause}" for cause in waits}
    waited = {names[cause]: seconds for cause, seconds in waits.items()}
    shares = {f"perf/learner_idle/{cause}": seconds / total_s for cause, seconds in waits.items()}
    return {
        **stages,
        **waited,
        "timing_s/other": total_s - sum(stages.values()) - sum(waits.values()),
        "timing_s/step": total_s,
        **shares,
        "perf/learner_idle_share": shares[f"perf/learner_idle/{BATCH}"],
        "perf/learner_busy_share": 1.0 - sum(shares.values()),
    }
