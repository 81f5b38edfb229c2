"""The time of each stage of a step, and its name in a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.core.runtime.clock import Clock, SystemClock


class Stopwatch:
    """Seconds per stage of one step; stages do not overlap.

    A stage is also a range of `torch.profiler` and, on a GPU, of NVTX.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.seconds: dict[str, float] = {}
        self._has_cuda = torch.cuda.is_available()

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Add the time of the block to `stage`."""
        start = self._clock.now()
        if self._has_cuda:
            torch.cuda.nvtx.range_push(stage)
        try:
            with torch.profiler.record_function(stage):
                yield
        finally:
            if self._has_cuda:
                torch.cuda.nvtx.range_pop()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + self._clock.now() - start

    def read(self) -> dict[str, float]:
        """Return `timing_s/<stage>` and start anew."""
        found = {f"timing_s/{stage}": seconds for stage, seconds in self.seconds.items()}
        self.seconds = {}
        return found
