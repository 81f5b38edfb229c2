"""Obstacles: what keeps a run from its next step, in the words of the service that met it (pure).

A service reports its obstacles in its status, for as long as they hold. The supervisor gathers them
(`asyncrl.control.diagnosis`). Nothing but the end of a run is decided by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from asyncrl.core.rpc.message import Message

MAX_REASON_CHARACTERS = 1000


class Cause(StrEnum):
    """The kinds of obstacles, the gravest first: one without which others may not be there."""

    JOURNAL_AWAY = "journal_away"
    DISK_FULL = "disk_full"
    NO_ROOM = "no_room"
    SERVICE_DOWN = "service_down"
    WEIGHTS_REFUSED = "weights_refused"
    WEIGHTS_UNDELIVERED = "weights_undelivered"
    REWARDS_FAIL = "rewards_fail"
    GROUPS_FAIL = "groups_fail"
    SOURCES_PAUSED = "sources_paused"
    NO_AGENT = "no_agent"
    STALL = "stall"
    SOURCE_PAUSED = "source_paused"
    FAULTY_ZEROS = "faulty_zeros"
    CHECKPOINT_FAILS = "checkpoint_fails"
    JOURNAL_EVICTS = "journal_evicts"


ADVISORY = (Cause.CHECKPOINT_FAILS, Cause.JOURNAL_EVICTS, Cause.SOURCE_PAUSED, Cause.FAULTY_ZEROS)
"""Kinds with which a run goes on."""


class Obstacle(Message, frozen=True):
    """Obstacle to a run's next step.

    Attributes:
        service: The service that met it; empty for the one that reports it.
        reason: Last message of that service, or of the library that it called.
        count: Times in a row.
        since: Wall-clock seconds of the first time; 0 where only the supervisor knows.
        blocks: The run cannot go on while it holds; otherwise others do the work meanwhile.
    """

    service: str
    cause: Cause
    reason: str
    count: int = 1
    since: float = 0.0
    blocks: bool = True

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the obstacle: reports with equal keys are one obstacle."""
        return self.service, self.cause.value

    @property
    def sentence(self) -> str:
        """The obstacle as people read it."""
        return sentence_of(self.reason, self.count)

    def __post_init__(self) -> None:
        """Cut the reason: a library may say a lot."""
        if len(self.reason) > MAX_REASON_CHARACTERS:
            msgspec.structs.force_setattr(self, "reason", self.reason[:MAX_REASON_CHARACTERS])

    def seen(self, *, since: float, blocks: bool) -> Obstacle:
        """Return the obstacle with what only the supervisor knows."""
        return msgspec.structs.replace(self, since=since, blocks=blocks)


Tell = Callable[[Sequence[Obstacle]], None]
"""Told what a service that is still being built waits for now."""


def tell_nobody(obstacles: Sequence[Obstacle]) -> None:
    """Do nothing: nobody asks."""


class FailureStreak:
    """Failures of one kind of work since it last succeeded. One thread writes, any may report.

    >>> streak = FailureStreak(Cause.GROUPS_FAIL)
    >>> streak.fail("out of memory")
    >>> [(one.reason, one.count) for one in streak.report()]
    [('out of memory', 1)]
    >>> streak.succeed()
    >>> streak.report()
    ()
    """

    def __init__(self, cause: Cause) -> None:
        self._cause = cause
        self._last: Obstacle | None = None

    @property
    def count(self) -> int:
        """Failures since the last success."""
        return self._last.count if self._last is not None else 0

    def fail(self, reason: str) -> None:
        """Count a failure; the last reason is told."""
        self._last = Obstacle("", self._cause, reason, self.count + 1)

    def succeed(self) -> None:
        """Forget the failures: it works."""
        self._last = None

    def report(self) -> tuple[Obstacle, ...]:
        """Return what the status tells of it."""
        return () if self._last is None else (self._last,)


def sentence_of(reason: str, count: int) -> str:
    """Return the sentence of an obstacle that was met `count` times in a row."""
    return f"{reason} ({count} times in a row)" if count > 1 else reason
