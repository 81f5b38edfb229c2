"""Events of the ledger: the only way in which its state changes (pure).

An event is a small tuple. `pack` and `unpack` turn it into plain values for the journal and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncrl.buffer.ledger.tickets import DropReason, PartialLoss, Reissue
from asyncrl.core.errors import WireError

UNSAID = -1
"""The largest lag of a step whose learner did not report it."""

OLD_NAMES = {"Carried": "PartialStored", "CarryDropped": "PartialDropped"}
OLD_REASONS = {
    "zero_std": "zero_variance",
    "uniform": "zero_variance",
    "carried": "partial",
    "retired": "deregistered",
}
"""Names of events, and of reasons, that older journals hold."""


class DataDescribed(NamedTuple):
    """`sources`: (prompts, weight) of each one, where there are several."""

    num_prompts: int
    digest: str
    sources: tuple[tuple[int, float], ...] = ()


class Opened(NamedTuple):
    token: int
    holder: str


class Resumed(NamedTuple):
    """`is_fork`: later steps are trained differently than before. `note`: values that the learner keeps."""

    token: int
    step: int
    is_fork: bool = False
    note: tuple[tuple[str, float], ...] = ()


class VersionRegistered(NamedTuple):
    number: int
    step: int


class Issued(NamedTuple):
    ticket: int
    source: int
    pass_number: int
    row: int
    position: int
    parent: int
    generation: int


class Leased(NamedTuple):
    """`version`: the number that the replica served when it asked; 0 in journals of before."""

    ticket: int
    replica: str
    deadline: float
    position: int
    version: int = 0


class Renewed(NamedTuple):
    tickets: tuple[int, ...]
    deadline: float


class Restarted(NamedTuple):
    """The service started again: every lease gets the time of a fresh one."""

    deadline: float


class Stored(NamedTuple):
    ticket: int
    num_tokens: int
    num_bytes: int
    versions: tuple[int, int]


class Reissued(NamedTuple):
    ticket: int
    reason: str


class PartialStored(NamedTuple):
    """Partial work of the current attempt came back: ISSUED again, the next attempt may go on from it."""

    ticket: int
    num_tokens: int
    num_bytes: int
    versions: tuple[int, int]


class TurnsStored(NamedTuple):
    """Record `number` of the turns that a leased attempt has finished; a later attempt may go on after it."""

    ticket: int
    number: int
    num_bytes: int
    versions: tuple[int, int]


class PartialDropped(NamedTuple):
    """A partial rollout is over age, or its payload is lost: the ticket is generated from its start."""

    ticket: int
    reason: str


class Dropped(NamedTuple):
    ticket: int
    reason: str
    is_given_up: bool


class Reserved(NamedTuple):
    step: int
    tickets: tuple[int, ...]


class Trained(NamedTuple):
    """`lag_max`: the largest lag of a token that entered the loss, `UNSAID` if the learner did not say."""

    step: int
    lag_max: int = UNSAID


class Checkpointed(NamedTuple):
    token: int
    step: int
    digest: str
    kept: tuple[int, ...]


class EvaluationRequested(NamedTuple):
    id: int
    step: int
    num_parts: int = 1


class EvaluationGiven(NamedTuple):
    """A part was handed to `replica`, or, where that is empty, taken back; `version` is its served one."""

    id: int
    replica: str
    part: int = 0
    version: int | None = None


class EvaluationRestarted(NamedTuple):
    """No replica was left at its version: its results are thrown away."""

    id: int


class EvaluationSkipped(NamedTuple):
    """Too many orders are open: this one will have no result."""

    id: int


class EvaluationPartDone(NamedTuple):
    """`tallies`: (name, count, total, squares, trials) each."""

    id: int
    part: int
    version: int
    tallies: tuple[tuple[str, int, float, float, int], ...]


class EvaluationDone(NamedTuple):
    id: int
    version: int
    metrics: tuple[tuple[str, float], ...]


Event = (
    DataDescribed
    | Opened
    | Resumed
    | VersionRegistered
    | Issued
    | Leased
    | Renewed
    | Restarted
    | Stored
    | Reissued
    | PartialStored
    | TurnsStored
    | PartialDropped
    | Dropped
    | Reserved
    | Trained
    | Checkpointed
    | EvaluationRequested
    | EvaluationGiven
    | EvaluationRestarted
    | EvaluationSkipped
    | EvaluationPartDone
    | EvaluationDone
)

_KINDS: dict[str, Callable[..., Event]] = {kind.__name__: kind for kind in Event.__args__}


def pack(event: Event) -> list[object]:
    """Return `event` as a list of plain values."""
    return [type(event).__name__, *event]


def unpack(values: Sequence[object]) -> Event:
    """Return the event that `pack` packed.

    Raises:
        WireError: The values are no event of this version of asyncrl.
    """
    try:
        name = str(values[0])
        kind = _KINDS[OLD_NAMES.get(name, name)]
        event = kind(*(_as_tuple(value) for value in values[1:]))
        if isinstance(event, Dropped | Reissued):
            event = event._replace(reason=OLD_REASONS.get(event.reason, event.reason))
        if isinstance(event, Dropped):
            DropReason(event.reason)
        if isinstance(event, Reissued):
            Reissue(event.reason)
        if isinstance(event, PartialDropped):
            PartialLoss(event.reason)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"the journal holds no event that this version knows: {values!r:.200}") from error
    return event


def _as_tuple(value: object) -> object:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
