"""The queueing model: slots that sample, a learner that trains, and a rule between them (pure).

Consumes lengths; waits for nothing but simulated time; unblocked by finished groups and trained steps;
produces counts in a `Tally`. The loop uses only the `Rule` interface; a rule never sees a future event.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from asyncrl.core.staleness import lag
from research.policies.rules import Rule
from research.policies.tally import Figures, Tally
from research.policies.work import Shape, Work, spans_of

FINISHED, TRAINED, WAKE = range(3)


class Queue:
    """One run.

    >>> from itertools import repeat
    >>> from research.policies.rules import AdmissionOnly
    >>> shape = Shape(groups_per_step=2, slots=2, max_lag=1)
    >>> queue = Queue(shape, AdmissionOnly(shape), repeat(1000), Tally(first_step=5, last_step=10))
    >>> queue.run().violations
    0.0
    """

    def __init__(self, shape: Shape, rule: Rule, lengths: Iterator[int], tally: Tally) -> None:
        self._shape = shape
        self._rule = rule
        self._lengths = lengths
        self._tally = tally
        self._time = 0.0
        self._published = [0.0]
        self._events: list[tuple[float, int, int]] = []
        self._running: dict[int, Work] = {}
        self._finished: dict[int, Work] = {}
        self._is_training = False
        self._idle_since = 0.0
        self._lag_max = 0

    @property
    def step(self) -> int:
        """Steps trained so far."""
        return len(self._published) - 1

    def run(self) -> Figures:
        """Run until every group of the cohort is trained or dropped; return the figures."""
        tally = self._tally
        while self.step < tally.last_step or not tally.is_complete:
            self._settle_drops()
            self._start_step()
            self._fill_slots()
            self._take_event()
        duration = self._published[tally.last_step] - self._published[tally.first_step]
        return tally.figures(duration, self._shape.groups_per_step, self._shape.max_lag)

    def _take_event(self) -> None:
        assert self._events, "deadlock: no pending event"
        self._time, kind, number = heapq.heappop(self._events)
        if kind == TRAINED:
            self._finish_step()
        elif kind == FINISHED and number in self._running:
            self._finished[number] = self._running.pop(number)
            self._rule.finish(self._finished[number], self._time)

    def _fill_slots(self) -> None:
        while len(self._running) < self._shape.slots:
            number = self._rule.admit(self._time)
            if number is None:
                return
            work = Work(number, next(self._lengths), self._time, self.step)
            self._running[number] = work
            self._tally.begin(work, self.step)
            heapq.heappush(self._events, (work.end, FINISHED, number))

    def _start_step(self) -> None:
        if self._is_training:
            return
        batch = self._rule.take(self._time)
        if batch is None:
            self._sleep()
            return
        if self._tally.covers(self.step):
            self._tally.waited += self._time - self._idle_since
        self._is_training, self._lag_max = True, 0
        for number in batch.numbers:
            self._train(self._finished.pop(number), batch.lowest_version)
        heapq.heappush(self._events, (self._time + 1.0, TRAINED, 0))

    def _sleep(self) -> None:
        wake_time = self._rule.wake_time()
        if wake_time is not None and wake_time > self._time:
            heapq.heappush(self._events, (wake_time, WAKE, 0))

    def _train(self, work: Work, lowest_version: int) -> None:
        tokens_by_lag: Counter[int] = Counter()
        for span in spans_of(work, self._published):
            if span.version >= lowest_version:
                tokens_by_lag[lag(self.step, span.version - 1)] += span.end - span.start
        self._lag_max = max(self._lag_max, max(tokens_by_lag, default=0))
        self._tally.train(work, self.step, tokens_by_lag, self._shape.max_lag)

    def _finish_step(self) -> None:
        self._published.append(self._time)
        self._is_training, self._idle_since = False, self._time
        self._rule.publish(self._lag_max, self._time)

    def _settle_drops(self) -> None:
        for number in self._rule.take_dropped():
            if number in self._running:
                work = self._running.pop(number)
                self._tally.drop(work, work.tokens_by(self._time))
            else:
                work = self._finished.pop(number)
                self._tally.drop(work, work.num_tokens)
