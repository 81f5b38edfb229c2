"""What happened to the ledger: the only words in which its state changes (pure).

An event is a small tuple. `pack` and `unpack` turn it into plain values for the journal and back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncrl.buffer.ledger.tickets import DropReason, Reissue
from asyncrl.errors import WireError


class DataDescribed(NamedTuple):
    num_prompts: int
    digest: str


class Opened(NamedTuple):
    token: int
    holder: str


class Resumed(NamedTuple):
    """`is_fork`: what follows is trained otherwise than before. `note`: what the learner must not forget."""

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
    ticket: int
    replica: str
    deadline: float
    position: int


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


class Dropped(NamedTuple):
    ticket: int
    reason: str
    is_given_up: bool


class Reserved(NamedTuple):
    step: int
    tickets: tuple[int, ...]


class Trained(NamedTuple):
    step: int


class Checkpointed(NamedTuple):
    token: int
    step: int
    digest: str
    kept: tuple[int, ...]


class EvaluationRequested(NamedTuple):
    id: int
    step: int


class EvaluationGiven(NamedTuple):
    id: int
    replica: str


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
    | Dropped
    | Reserved
    | Trained
    | Checkpointed
    | EvaluationRequested
    | EvaluationGiven
    | EvaluationDone
)

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}


def pack(event: Event) -> list[Any]:
    """Return `event` as a list of plain values."""
    return [type(event).__name__, *event]


def unpack(values: list[Any]) -> Event:
    """Return the event that `pack` packed.

    Raises:
        WireError: The values are no event of this version of asyncrl.
    """
    try:
        kind = _KINDS[values[0]]
        event: Event = kind(*(_as_tuple(value) for value in values[1:]))
        if isinstance(event, Dropped):
            DropReason(event.reason)
        if isinstance(event, Reissued):
            Reissue(event.reason)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"the journal holds no event that this version knows: {values!r:.200}") from error
    return event


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
