"""Types of a reward: the task and the answer that it judges, its score and reason, the protocol of its parts.

Invariant: a `Score` holds finite numbers only; any other value is a `RewardError`, and never reaches a
trajectory.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.experience import MAX_REASON_CHARS
from asyncrl.core.states import FAILURES, Reason

Fault = Literal["raised", "timeout", "not_finite", "not_a_number", "died", "unreachable", "refused"]
"""The fault: the function raised, took too long, or returned NaN or no number at all; its process
died; the server could not be reached, or would not score the answer."""


REASONS: Mapping[Fault, Reason] = {
    "timeout": Reason.TIMEOUT,
    "died": Reason.INFRASTRUCTURE,
    "unreachable": Reason.INFRASTRUCTURE,
}
"""Reason of a fault, unless more is known; of the others the code is to blame."""
_UNREACHED = frozenset(
    {"ConnectionError", "ConnectError", "APIConnectionError", "ClientConnectionError", "InfraError"}
)
_LATE = frozenset({"TimeoutError", "TimeoutException", "Timeout", "APITimeoutError"})
"""Classes by name: of the builtins, httpx, requests, aiohttp, openai and verifiers."""

MAX_NUMBER = 3.4028234663852886e38
"""The largest of 32 bits: rewards are sent as such."""


class RewardError(AsyncrlError, ValueError):
    """An answer could not be scored; `kind` says how, `reason` whose fault that is.

    The message can be sent: it encodes as UTF-8.
    """

    BLAMED = Reason.REWARD
    """Whose code is to blame for a fault without a reason of its own."""

    def __init__(
        self, message: str, *, hint: str = "", kind: Fault = "raised", reason: Reason | None = None
    ) -> None:
        super().__init__(message.encode("utf-8", "backslashreplace").decode(), hint=hint)
        self.kind: Fault = kind
        self.reason = reason or REASONS.get(kind, self.BLAMED)


class RewardsFailed(RewardError):
    """More answers than `reward.max_error_rate` allows could not be scored: the run must end."""


class Task(Protocol):
    """Facts about a prompt that a reward may use (`rollout_service.data.prompts.Prompt` has them)."""

    @property
    def row(self) -> int: ...

    @property
    def content(self) -> str | Sequence[Mapping[str, object]]: ...

    @property
    def ground_truth(self) -> object: ...

    @property
    def data_source(self) -> str: ...

    @property
    def extra_info(self) -> Mapping[str, object]: ...


@dataclass(frozen=True)
class Answer:
    """Input of a reward function."""

    prompt: Task
    response: str
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True)
class Score:
    """Score of an answer.

    Attributes:
        value: The reward.
        parts: Parts of the reward by name, before weighting.
        reason: Why it is 0 or less, if that is known: a `Reason` of the model's, or a few words.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def __post_init__(self) -> None:
        assert all(math.isfinite(value) for value in (self.value, *self.parts.values())), "checked where made"


class Reward(Protocol):
    """Anything that scores answers, one call per answer, many at once."""

    async def score(self, answer: Answer) -> Score:
        """Return what the answer is worth. Raises RewardError."""


class Part(Protocol):
    """One number about an answer: a function, a model, or a server."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Start what it needs. Raises ConfigError if that cannot be used."""

    async def value(self, answer: Answer) -> Score:
        """Return the number, and the reason that it gives itself. Raises RewardError."""

    async def close(self) -> None:
        """End what it started; calls under way fail."""

    def child_pids(self) -> list[int]:
        """Return the processes that it started and that live."""


def blame(error: BaseException) -> Reason | None:
    """Return the reason that the class of a user's exception tells, None if it may be any fault."""
    names = {one.__name__ for one in type(error).__mro__}
    if names & _LATE:
        return Reason.TIMEOUT
    return Reason.INFRASTRUCTURE if names & _UNREACHED else None


def checked_score(name: str, value: object) -> Score:
    """Return what the reward `name` said: a number, or a mapping with a `score` and perhaps a `reason`.

    Raises:
        RewardError: It is no finite number, or the reason is a failure's: that is no reward.
    """
    reason = ""
    if isinstance(value, Mapping):  # verl's functions may return {"score": ..., "acc": ...}
        said, value = value.get("reason"), value.get("score", value)
        reason = as_reason(said) if isinstance(said, str) else ""
    if reason in FAILURES:
        raise RewardError(f"the reward '{name}' says that it failed: {reason}", reason=Reason(reason))
    return Score(checked_number(name, value), reason=reason)


def as_reason(said: str) -> str:
    """Return a reason in a user's words as what can be sent."""
    return "".join(letter for letter in said if letter.isprintable())[:MAX_REASON_CHARS]


def checked_number(name: str, value: object) -> float:
    """Return what the reward `name` said as a float that is finite in 32 bits.

    Raises:
        RewardError: It is no number, or not such a one.
    """
    if not isinstance(value, numbers.Real):
        said = f"a {type(value).__name__} ({value!r:.60})"
        raise RewardError(f"the reward '{name}' returned {said}, not a number", kind="not_a_number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_NUMBER:  # nan neither
        raise RewardError(
            f"the reward '{name}' returned {number}, which is not a finite 32-bit number", kind="not_finite"
        )
    return number
