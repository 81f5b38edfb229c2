"""Timing of a simulated learner's checkpoints: the end of each write, and the wait for it (pure).

Owns no time: it is an argument. As in production one checkpoint is written at a time, beside training; only
the copy to the host, and the wait for the one before, hold the learner up.
"""

from __future__ import annotations


class CheckpointSchedule:
    """The checkpoints of one learner process.

    Args:
        copy_s: The learner stands still for it. write_s: From there until it is written.
        max_stall_s: That training waits for the checkpoint before, at most.

    Attributes:
        num_skipped: That were due while the one before was still being written.
    """

    def __init__(self, copy_s: float, write_s: float, max_stall_s: float) -> None:
        self.copy_s, self._write_s = copy_s, write_s
        self._max_stall_s = max_stall_s
        self._writing: int | None = None
        self._written_at = 0.0
        self.num_skipped = 0

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def wait_s(self, is_due: bool, now: float) -> tuple[float, bool]:
        """Return how long training waits for the checkpoint before, and whether it is written then."""
        left_s = max(0.0, self._written_at - now) if self.is_writing else 0.0
        patience_s = self._max_stall_s if is_due else 0.0
        return min(left_s, patience_s), left_s <= patience_s

    def begin(self, step: int, now: float) -> None:
        """Take a checkpoint: from `copy_s` on it is written beside training."""
        assert self._writing is None, "one checkpoint is written at a time"
        self._writing, self._written_at = step, now + self.copy_s + self._write_s

    def take_written(self) -> int:
        """Return the step of what has been written."""
        written, self._writing = self._writing, None
        assert written is not None, "something was being written"
        return written
