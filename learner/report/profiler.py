"""A window of learner steps that `torch.profiler` records.

Owns the trace files `rank-<rank>-steps-<first>-<last>.json` (Chrome's format: open them in Perfetto). It
must never change what is trained. Invariant: a window that was begun is written, also when the run ends
inside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)


class ProfilerWindow:
    """Records learner steps `first` to `end` - 1 (counted from 0), or nothing.

    Example:
        window = ProfilerWindow((10, 12), run_dir / "profile", rank=0)
        for step in range(20):
            with window.step(step):
                train(step)
        window.close()
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self._first, self._end = steps or (0, 0)
        self._folder, self._rank = folder, rank
        self._profile: profile | None = None
        self._begun = self._last = 0

    @contextmanager
    def step(self, step: int, is_end: bool = True) -> Iterator[None]:
        """Record the block if `step` is in the window; write the trace after its last step.

        A step may be several blocks; then `is_end` of the last one alone.

        A run that resumes inside the window records what is left of it.
        """
        if not self._first <= step < self._end:
            yield
            return
        if self._profile is None:
            self._begin(step)
        self._last = step
        has_failed = True
        try:
            with torch.profiler.record_function(f"learner_step_{step}"):
                yield
            has_failed = False
        finally:
            if has_failed or (is_end and step == self._end - 1):
                self.close()

    def close(self) -> None:
        """Write what was recorded and is not written yet."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._rank:05d}-steps-{self._begun}-{self._last}.json"
        running.export_chrome_trace(str(path))
        log.info("the profile of steps %d to %d is in %s", self._begun, self._last, path)

    def _begin(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        self._begun = step
