"""Rules of admission and reservation: the seam, and models of published ones (pure).

Each model is the rule alone, as its source states it, over the same queue; none of them is the whole
system. A rule names groups by number and never sees their lengths before they are finished.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from asyncrl.core.staleness import is_over_age, lag
from research.policies.work import Shape, Work


@dataclass(frozen=True)
class Batch:
    """Batch of a step: groups by number, without the tokens of versions below `lowest_version`."""

    numbers: tuple[int, ...]
    lowest_version: int = 0


class Rule(Protocol):
    """Policy that admits groups and chooses each batch."""

    def admit(self, time: float) -> int | None:
        """Return the number of the group that a free slot begins with, None if nothing may start."""

    def finish(self, work: Work, time: float) -> None:
        """Take in a finished group."""

    def take(self, time: float) -> Batch | None:
        """Return the batch of the next step, None while the learner must wait."""

    def publish(self, lag_max: int, time: float) -> None:
        """The step is trained and its weights are live; `lag_max` is the highest lag that it trained."""

    def take_dropped(self) -> list[int]:
        """Return the groups that will never be trained since the last call, in flight or finished."""

    def wake_time(self) -> float | None:
        """Return when to ask for a batch again although nothing has happened."""


class AdmissionOnly:
    """AReaL's rule: count what is admitted, train whatever is finished, oldest first.

    A group starts while accepted + running < (max_lag + version + 1) * batch
    (arXiv 2505.24298, section 5.1; `StalenessManager.get_capacity`).
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._num_admitted = 0
        self._finished: list[tuple[float, int]] = []
        self._version = 0

    def admit(self, time: float) -> int | None:
        limit = (self._shape.max_lag + self._version + 1) * self._shape.groups_per_step
        if self._num_admitted >= limit:
            return None
        self._num_admitted += 1
        return self._num_admitted

    def finish(self, work: Work, time: float) -> None:
        heapq.heappush(self._finished, (work.started, work.number))

    def take(self, time: float) -> Batch | None:
        if len(self._finished) < self._shape.groups_per_step:
            return None
        return Batch(tuple(heapq.heappop(self._finished)[1] for _ in range(self._shape.groups_per_step)))

    def publish(self, lag_max: int, time: float) -> None:
        self._version += 1

    def take_dropped(self) -> list[int]:
        return []

    def wake_time(self) -> float | None:
        return None


class Blocking(AdmissionOnly):
    """A step waits while a running group has reached the bound.

    Admission is AReaL's, so each group has a step reserved within the bound; the step does not start
    before every running group that began `max_lag` steps ago is finished. This is verl V1's
    `max_off_policy_strategy: wait` (verl pull request 6778).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._running: dict[int, int] = {}

    def admit(self, time: float) -> int | None:
        number = super().admit(time)
        if number is not None:
            self._running[number] = self._version
        return number

    def finish(self, work: Work, time: float) -> None:
        del self._running[work.number]
        super().finish(work, time)

    def take(self, time: float) -> Batch | None:
        oldest = next(iter(self._running.values()), self._version)  # they began in this order
        return None if lag(self._version, oldest) >= self._shape.max_lag else super().take(time)


class DropAtConsumption:
    """prime-rl's rule: groups whose first token is over the bound are dropped whole.

    Finished groups are cut into batches in the order in which they finish; the batch being collected
    may be one ahead of the batch in training, and nothing starts once it is cut. A cut batch knows
    the weights that it will train, so older groups are swept before; a running group is cancelled
    once the bound has passed it (`max_off_policy_steps`, `TARGET_LAG` 1: `Queue._drop_stale`,
    `Shipper.update_gate` and `Dispatcher.on_version_pending` of prime-rl's orchestrator).
    """

    LEAD = 1

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._num_admitted = 0
        self._version = 0
        self._running: dict[int, int] = {}
        self._finished: dict[int, int] = {}
        self._cut: deque[Batch] = deque()
        self._num_cut = 0
        self._dropped: list[int] = []

    def admit(self, time: float) -> int | None:
        if self._num_cut - self._version > self.LEAD:
            return None
        self._num_admitted += 1
        self._running[self._num_admitted] = self._version
        return self._num_admitted

    def finish(self, work: Work, time: float) -> None:
        self._finished[work.number] = self._running.pop(work.number)
        self._cut_batches()

    def take(self, time: float) -> Batch | None:
        return self._cut.popleft() if self._cut else None

    def publish(self, lag_max: int, time: float) -> None:
        self._version += 1
        self._drop_older(self._running, self._version)
        self._cut_batches()

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def wake_time(self) -> float | None:
        return None

    def _cut_batches(self) -> None:
        size = self._shape.groups_per_step
        while self._num_cut - self._version <= self.LEAD:
            self._drop_older(self._finished, self._num_cut)
            if len(self._finished) < size:
                return
            numbers = tuple(self._finished)[:size]
            for number in numbers:
                del self._finished[number]
            self._cut.append(Batch(numbers))
            self._num_cut += 1

    def _drop_older(self, groups: dict[int, int], trained_step: int) -> None:
        """Drop the groups whose first token would be over the bound at `trained_step`."""
        max_lag = self._shape.max_lag
        stale = [number for number, start in groups.items() if is_over_age(trained_step, start, max_lag)]
        for number in stale:
            del groups[number]
        self._dropped += stale
