"""The queueing model with a fleet that an autoscaler changes while it runs.

Owns what the autoscaler sees of the model: a row per step, as the supervisor has one. A second is a
learner step; a replica that is wanted has its slots after `START_STEPS`, one that leaves takes no more
groups and finishes those that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrl.control.fleet.autoscaler import Autoscaler, Decision
from asyncrl.core.staleness import lag
from research.policies.queue import Queue
from research.policies.rules import Rule
from research.policies.tally import Tally
from research.policies.work import Shape, Work, spans_of

START_STEPS = 5.0


@dataclass(frozen=True)
class Change:
    """A decision, and the step at which it was made."""

    step: int
    decision: Decision


class ElasticQueue(Queue):
    """A `Queue` whose slots follow an autoscaler.

    Args:
        replicas: At the beginning. slots: Of each.

    `changes` is what was decided, `idle` the learner's idle share of every step.
    """

    def __init__(
        self,
        shape: Shape,
        rule: Rule,
        lengths: Iterator[int],
        num_steps: int,
        autoscaler: Autoscaler,
        *,
        replicas: int,
        slots: int,
    ) -> None:
        super().__init__(replace(shape, slots=replicas * slots), rule, lengths, Tally(0, num_steps))
        self._autoscaler, self._slots_each = autoscaler, slots
        self._wanted = self._ready = replicas
        self._ready_at = 0.0
        self._waited = 0.0
        self._busy = self._offered = 0.0
        self._tokens_by_lag: Counter[int] = Counter()
        self.changes: list[Change] = []
        self.idle: list[float] = []

    @property
    def replicas(self) -> int:
        """Replicas that are wanted."""
        return self._wanted

    def _take_event(self) -> None:
        before, num_running = self._time, len(self._running)
        super()._take_event()
        self._busy += (self._time - before) * min(num_running, self._shape.slots)
        self._offered += (self._time - before) * self._shape.slots
        if self._ready != self._wanted and self._time >= self._ready_at:
            self._set_ready(self._wanted)

    def _start_step(self) -> None:
        was_training = self._is_training
        super()._start_step()
        if self._is_training and not was_training:
            self._waited = self._time - self._idle_since

    def _train(self, work: Work, lowest_version: int) -> None:
        super()._train(work, lowest_version)
        for span in spans_of(work, self._published):
            self._tokens_by_lag[lag(self.step, span.version - 1)] += span.end - span.start

    def _finish_step(self) -> None:
        super()._finish_step()
        row = self._take_row()
        self.idle.append(row["timing_s/wait"] / row["timing_s/step"])
        decision = self._autoscaler.decide(self._time, self._wanted, self._ready, [row])
        if decision is not None:
            self.changes.append(Change(self.step, decision))
            self._scale(decision.replicas)

    def _scale(self, replicas: int) -> None:
        is_growing = replicas > self._wanted
        self._wanted, self._ready_at = replicas, self._time + START_STEPS
        if not is_growing:
            self._set_ready(replicas)

    def _set_ready(self, replicas: int) -> None:
        self._ready = replicas
        self._shape = replace(self._shape, slots=replicas * self._slots_each)

    def _take_row(self) -> dict[str, float]:
        num_tokens = max(1, self._tokens_by_lag.total())
        row = {
            "timing_s/wait": self._waited,
            "timing_s/step": self._waited + 1.0,
            "perf/rollout_idle_share": 1.0 - self._busy / self._offered if self._offered else 0.0,
            "staleness/lag_mean": sum(age * count for age, count in self._tokens_by_lag.items()) / num_tokens,
        }
        self._busy = self._offered = 0.0
        self._tokens_by_lag.clear()
        return row
