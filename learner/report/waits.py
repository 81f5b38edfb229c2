"""Waits of rank 0 by cause, the time of each stage of a step and their sum, and the memory of a rank.

Invariant: the waits, by cause, the work, by stage, and the rest add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil
import torch

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


class Stopwatch:
    """Seconds per stage of one step; stages do not overlap.

    A stage is also a range of `torch.profiler` and, on a GPU, of NVTX.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of the block to `stage`."""
        start, has_cuda = self._clock.now(), torch.cuda.is_initialized()
        if has_cuda:
            torch.cuda.nvtx.range_push(stage)
        try:
            with torch.profiler.record_function(stage):
                yield
        finally:
            if has_cuda:
                torch.cuda.nvtx.range_pop()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self._clock.now() - start

    def read(self) -> dict[str, float]:
        """Return `timing_s/<stage>` and start anew."""
        found = {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}
        self.seconds = {}
        return found


_GIB = 2**30


def measure_memory() -> dict[str, float]:
    """Return `perf/*memory*` of this process; the GPU's where it computes on one."""
    found = {
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / _GIB,
        "perf/process_memory_gb": psutil.Process().memory_info().rss / _GIB,
    }
    if torch.cuda.is_initialized():
        found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / _GIB
        found["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / _GIB
    return found
