"""Autoscaler: the number of rollout replicas, from the waits and the age of the data (pure).

Owns the rule and its patience. It starts and ends nothing: a decision is a number with its reason.

    needed = replicas x (their busy share) / (1 - the learner's idle share)

replicas keep the learner busy all the time. The autoscaler grows to that number while the learner idles and
the replicas do not; it removes one replica while the learner never waits and the others could do its work.
A lag near the bound makes it remove one sooner: surplus groups lie in the buffer and age.
Invariant: a decision is made from steps of the fleet as it stands, all of it READY, and never from fewer
than `Pacing.min_steps` of them; each decision that reverses the one before makes the next shrinking wait
longer.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.core.config.tree import Config
from asyncrl.core.metrics.metric import Row

GROW_AT = 0.2
"""The learner's idle share from which it wants more replicas, if the present ones are `BUSY`."""
BUSY = 0.7
"""Least share of time that the present replicas must work for a further one to have work."""
SHRINK_AT = 0.05
"""The learner's idle share up to which a replica may be removed."""
FULL, FULL_IF_OLD = 0.85, 0.95
"""Largest busy share of the remaining replicas after a removal; the second while the data is `OLD`."""
OLD = 0.8
"""Mean lag, as a share of the bound, from which the data counts as old."""
MOST_GROWTH = 2.0
NUM_PARTS = 3
"""Of a window: a bad stretch that is shorter than two of them changes nothing."""


@dataclass(frozen=True)
class Pacing:
    """Waits of the autoscaler, in seconds.

    Attributes:
        settle_s: After the fleet has reached its wanted size: steps of this time still reflect the old size.
        window_s: Time whose steps are judged.
        min_steps: Least number of judged steps.
        hold_s: Between a change and the next shrinking; doubled, up to `max_hold_s`, by every growth that
            takes a shrinking back.
    """

    settle_s: float = 30.0
    window_s: float = 60.0
    min_steps: int = 9
    hold_s: float = 120.0
    max_hold_s: float = 3600.0


@dataclass(frozen=True)
class Decision:
    """Wanted number of replicas, and the reason."""

    replicas: int
    reason: str


@dataclass(frozen=True)
class _Step:
    """Figures of one step: seconds of it, of them waited, the replicas' idle share, the mean lag."""

    time: float
    step_s: float
    wait_s: float
    rollout_idle: float
    lag: float


@dataclass(frozen=True)
class _Judgement:
    """A window of steps. `parts`: the learner's idle share in each part of it, which must agree."""

    idle: float
    parts: tuple[float, ...]
    busy: float
    lag: float

    def describe(self, max_lag: int) -> str:
        return (
            f"the learner idles {self.idle:.0%}, the replicas {1 - self.busy:.0%}, "
            f"mean lag {self.lag:.1f} of {max_lag}"
        )


class Autoscaler:
    """Looks at every pulse; see the module.

    >>> scaler = Autoscaler(1, 4, max_lag=4, pacing=Pacing(settle_s=0, window_s=8))
    >>> row = {"timing_s/step": 1.0, "timing_s/wait": 0.5, "perf/rollout_idle_share": 0.0}
    >>> decisions = [scaler.decide(float(second), wanted=1, ready=1, rows=[row]) for second in range(10)]
    >>> next(filter(None, decisions)).replicas
    2
    """

    def __init__(self, minimum: int, maximum: int, max_lag: int, pacing: Pacing | None = None) -> None:
        assert 0 <= minimum <= maximum
        self._minimum, self._maximum, self._max_lag = minimum, maximum, max_lag
        self._pacing = pacing or Pacing()
        self._window: deque[_Step] = deque()
        self._wanted = -1
        self._calm_since = math.inf
        self._changed_at = -math.inf
        self._hold_s = self._pacing.hold_s
        self._has_shrunk = False

    def decide(self, now: float, wanted: int, ready: int, rows: Iterable[Row]) -> Decision | None:
        """Update from the steps since the last call, and return a decision, None in most cases.

        Args:
            now: Seconds, of any clock that only goes on.
            wanted: Replicas that there are to be. ready: Of them, those that are READY.
            rows: Of the steps since the last look.
        """
        if wanted != self._wanted or ready != wanted:
            if wanted != self._wanted:
                self._changed_at = now
            self._wanted, self._calm_since = wanted, math.inf
            self._window.clear()
            return None
        self._calm_since = min(self._calm_since, now)
        if now - self._calm_since >= self._pacing.settle_s:
            self._window.extend(_read(now, row) for row in rows)
            self._forget(now)
        if now - self._calm_since < self._pacing.settle_s + self._pacing.window_s:
            return None
        if len(self._window) < self._pacing.min_steps:
            return None
        decision = self._judge(now, _judgement(list(self._window)))
        if decision is not None:  # one that could not be carried out is made again a window later
            self._calm_since = now
            self._window.clear()
        return decision

    def _forget(self, now: float) -> None:
        """Drop steps older than the window, but keep enough to judge by."""
        while (
            len(self._window) > self._pacing.min_steps and self._window[0].time < now - self._pacing.window_s
        ):
            self._window.popleft()

    def _judge(self, now: float, found: _Judgement) -> Decision | None:
        if min(found.parts) > GROW_AT and found.busy >= BUSY and self._wanted < self._maximum:
            return self._grow(found)
        is_held = now - self._changed_at < self._hold_s
        if max(found.parts) < SHRINK_AT and self._wanted > max(1, self._minimum) and not is_held:
            return self._shrink(found)
        return None

    def _grow(self, found: _Judgement) -> Decision:
        needed = self._wanted * found.busy / max(1 - found.idle, 1e-9)
        most = min(self._maximum, max(self._wanted + 1, int(MOST_GROWTH * self._wanted)))
        target = min(most, max(self._wanted + 1, math.ceil(needed - 1e-6)))
        if self._has_shrunk:
            self._hold_s = min(2 * self._hold_s, self._pacing.max_hold_s)
        self._has_shrunk = False
        return self._say(target, found)

    def _shrink(self, found: _Judgement) -> Decision | None:
        is_old = found.lag >= OLD * self._max_lag > 0
        others = self._wanted * found.busy / (self._wanted - 1)
        if others > (FULL_IF_OLD if is_old else FULL):
            return None
        self._has_shrunk = True
        return self._say(self._wanted - 1, found)

    def _say(self, target: int, found: _Judgement) -> Decision:
        return Decision(target, f"{self._wanted} -> {target} replicas: {found.describe(self._max_lag)}")


def _read(now: float, row: Row) -> _Step:
    spare = float(row.get("perf/rollout_idle/standby", 0.0))  # spares idle on purpose
    idle = float(row.get("perf/rollout_idle_share", 0.0)) - spare
    return _Step(
        now,
        float(row.get("timing_s/step", 0.0)),
        float(row.get("timing_s/wait", 0.0)),
        idle / (1.0 - spare) if spare < 1.0 else 0.0,
        float(row.get("staleness/lag_mean", 0.0)),
    )


def _judgement(steps: Sequence[_Step]) -> _Judgement:
    cuts = [len(steps) * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    total_s = sum(step.step_s for step in steps) or 1.0
    return _Judgement(
        _idle(steps),
        tuple(_idle(steps[begin:end]) for begin, end in itertools.pairwise(cuts)),
        1.0 - sum(step.rollout_idle * step.step_s for step in steps) / total_s,
        sum(step.lag for step in steps) / len(steps),
    )


def _idle(steps: Sequence[_Step]) -> float:
    """Return the waited share of the steps' time without the longest wait: an evaluation is no shortage."""
    waits = sorted(step.wait_s for step in steps)
    total_s = sum(step.step_s for step in steps) - waits[-1]
    return sum(waits[:-1]) / total_s if total_s > 0 else 0.0


def autoscaler_of(config: Config) -> Autoscaler | None:
    """Return the autoscaler of a run that is given a range of replicas."""
    replicas = config.rollout.replicas
    if replicas.min == replicas.max:
        return None
    return Autoscaler(replicas.min, replicas.max, config.staleness.max_lag)
