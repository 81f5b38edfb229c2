"""Statistics of rewards by data source, and the alarm for zeros that look like faults (pure).

A zero is a reward of 0 or less. Owns the counts by source and outcome, and two rules: zeros whose reason
reads like a fault are a share of the newest rewards, or hardly any reward is left of what was usual. A task
that is hard from the start raises neither: its zeros say that the model is wrong, and were no fewer before.
"""

from __future__ import annotations

import re
from collections import Counter, deque

from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.states import Reason

NEWEST, MIN_USUAL, MAX_USUAL = 256, 256, 1024
"""Rewards that are judged, and those before them that say what is usual."""
FAULTY_SHARE = 0.2
LEAST_REWARDED, FALL = 0.35, 0.25
"""Usual share of other rewards than 0, and the part of it that is left. Samples of one prompt are alike: all
of 256 answers of a poorer source may be 0 by chance."""
MAX_SOURCES = 32
_NAMED = frozenset(Reason)
REWARDED, UNSAID, OTHER = "rewarded", "unsaid", "other"
_LIKE_FAULT = re.compile(
    r"error|exception|traceback|time.?out|timed|unavailable|unreachable|refused|connection|crash|killed|memory"
    r"|sandbox|infra|fail(ed|ure)|\b(429|5\d\d)\b",
    re.IGNORECASE,
)


class SourceRewards:
    """Rewards of one data source. While there is an alarm, what is usual stays as it was."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.alarm = ""
        self._newest: deque[str | None] = deque(maxlen=NEWEST)
        self._usual: deque[bool] = deque(maxlen=MAX_USUAL)
        self._zeros: Counter[str] = Counter()

    def add(self, value: float, reason: str) -> None:
        """Count a reward; its reason is read where it is a zero."""
        outcome = reason if value <= 0 else None
        self.counts[_outcome_of(outcome)] += 1
        if len(self._newest) == NEWEST:
            self._forget(self._newest[0])
        self._newest.append(outcome)
        if outcome is not None:
            self._zeros[outcome] += 1
        self.alarm = self._judge() if len(self._newest) == NEWEST else ""

    def _forget(self, outcome: str | None) -> None:
        if not self.alarm:
            self._usual.append(outcome is not None)
        if outcome is not None:
            self._zeros -= Counter((outcome,))

    def _judge(self) -> str:
        num_zeros = self._zeros.total()
        faulty = Counter({said: count for said, count in self._zeros.items() if _LIKE_FAULT.search(said)})
        if faulty.total() >= FAULTY_SHARE * NEWEST:
            said, _ = faulty.most_common(1)[0]
            return f"{faulty.total()} of the last {NEWEST} rewards are 0 for reasons like {said!r}"
        if len(self._usual) < MIN_USUAL or NEWEST - num_zeros > FALL * NEWEST:
            return ""
        usual = 1.0 - sum(self._usual) / len(self._usual)
        if usual < LEAST_REWARDED or NEWEST - num_zeros > FALL * usual * NEWEST:
            return ""
        said = ", ".join(f"{count} {_outcome_of(one)}" for one, count in self._zeros.most_common(3))
        return f"{num_zeros} of the last {NEWEST} rewards are 0 ({said}), {1.0 - usual:.0%} were before"


class ZeroWatch:
    """All data sources of a run; those beyond `MAX_SOURCES` are counted together."""

    def __init__(self) -> None:
        self._sources: dict[str, SourceRewards] = {}

    def add_scored(self, source: str, value: float, reason: str) -> None:
        """Count a reward."""
        self._of(source).add(value, reason)

    def add_failed(self, source: str, reason: Reason) -> None:
        """Count an answer that has none."""
        self._of(source).counts[reason.value] += 1

    def _of(self, source: str) -> SourceRewards:
        name = source or "data"
        if name not in self._sources and len(self._sources) >= MAX_SOURCES:
            name = OTHER
        return self._sources.setdefault(name, SourceRewards())

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the answers since the start by source and outcome."""
        return {name: dict(one.counts) for name, one in self._sources.copy().items()}

    def obstacles(self) -> tuple[Obstacle, ...]:
        """Return the alarm, which is advice: the run goes on."""
        told = [
            f"data source '{name}': {one.alarm}" for name, one in self._sources.copy().items() if one.alarm
        ]
        why = "; a fault that the reward or the environment hides? See 'asyncrl inspect rollouts --worst'"
        return (Obstacle("", Cause.FAULTY_ZEROS, "; ".join(told) + why),) if told else ()


def _outcome_of(reason: str | None) -> str:
    if reason is None:
        return REWARDED
    return reason if reason in _NAMED else OTHER if reason else UNSAID
