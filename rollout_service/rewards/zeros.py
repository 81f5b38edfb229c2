"""Statistics of rewards by data source, and the alarm for zeros that look like faults (pure).

A zero is a reward of 0 or less. Owns the counts by source and outcome, and two rules: zeros whose reason
reads like a fault are a share of the newest rewards, or the share of zeros has jumped. A task that is hard
from the start raises neither: its zeros say that the model is wrong, and their share was never lower.
"""

from __future__ import annotations

import re
from collections import Counter, deque

from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.states import Reason

NEWEST, MIN_USUAL, MAX_USUAL = 128, 128, 512
"""Rewards that are judged, and those before them that say what is usual."""
FAULTY_SHARE, JUMP = 0.2, 0.5
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
        self._newest: deque[str | None] = deque(maxlen=NEWEST)
        self._usual: deque[bool] = deque(maxlen=MAX_USUAL)
        self.alarm = ""

    def add(self, value: float, reason: str) -> None:
        """Count a reward; its reason is read where it is a zero."""
        outcome = reason if value <= 0 else None
        self.counts[_outcome_of(outcome)] += 1
        if len(self._newest) == NEWEST and not self.alarm:
            self._usual.append(self._newest[0] is not None)
        self._newest.append(outcome)
        self.alarm = self._judge()

    def _judge(self) -> str:
        if len(self._newest) < NEWEST:
            return ""
        zeros = [one for one in self._newest if one is not None]
        faulty = Counter(one for one in zeros if _LIKE_FAULT.search(one))
        if faulty.total() >= FAULTY_SHARE * NEWEST:
            said, _ = faulty.most_common(1)[0]
            return f"{faulty.total()} of the last {NEWEST} rewards are 0 for reasons like {said!r}"
        usual = sum(self._usual) / max(1, len(self._usual))
        if len(self._usual) >= MIN_USUAL and len(zeros) >= (usual + JUMP) * NEWEST:
            said = ", ".join(
                f"{count} {name}" for name, count in Counter(map(_outcome_of, zeros)).most_common(3)
            )
            return f"{len(zeros)} of the last {NEWEST} rewards are 0 ({said}), {usual:.0%} were before"
        return ""


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
