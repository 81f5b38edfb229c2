"""Records of the coordinator's past, for its log and its journal (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundRecord:
    """One closed round.

    Attributes:
        number, step: Of the version.
        parts: What each member had done at the end, by name.
        seconds: From the offer to the end.
        num_bytes: That the publisher sent, once for all members.
        cause: Why it failed; empty if it did not.
        causes: Why each member failed.
        culprits: Who was to blame.
    """

    round: int
    lane: str
    number: int
    step: int
    membership: int
    parts: dict[str, str]
    seconds: float
    num_bytes: int
    cause: str
    causes: dict[str, str]
    culprits: list[str]


@dataclass(frozen=True)
class BlameRecord:
    """A peer was found to be the cause of a failure; `number` is the newest version at the time."""

    culprit: str
    cause: str
    number: int


@dataclass(frozen=True)
class LoadFailureRecord:
    """An engine did not load version `number`, whose bytes had been verified beside it."""

    member: str
    number: int
    error: str


Record = RoundRecord | BlameRecord | LoadFailureRecord
