"""One operation of a service: its name on the wire, and what it takes and gives as typed structs (pure).

    RENEW = Operation("renew", Renew, Renewed)         # beside the service, in its `messages`
    operations.add(RENEW, self.renew)                  # the service: renew(request, asked: Renew) -> Renewed
    client.ask(RENEW, Renew("rollout.0", held))        # the caller: an Answer[Renewed]

What arrives is checked against the struct where it arrives, on both sides: types, ranges, lengths, names.
Invariant: no operation and no field of one is named in two places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from asyncrl.core.errors import WireError
from asyncrl.core.wire import Frame

MAX_NAME_CHARACTERS = 200
MAX_WAIT_S = 600.0

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
"""A text that is kept, or comes back in errors: a service's name, a digest."""
Wait = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_S)]
"""Time that a long poll may wait, in seconds."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Struct of a request or an answer, beside its frames."""


class Done(Message, frozen=True):
    """The answer of an operation that has nothing to tell but that it was done."""


class AskStatus(Message, frozen=True):
    """The request of a service's status, whose answer is a struct of its own."""


M = TypeVar("M", bound=Message)
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


@dataclass(frozen=True)
class Reply:
    """Raw result of a call, before it is read as an operation's answer."""

    args: dict[str, Any]
    frames: list[Frame]


@dataclass(frozen=True)
class Answer(Generic[A]):
    """Result of an operation."""

    message: A
    frames: Sequence[Frame] = ()


@dataclass(frozen=True)
class Operation(Generic[Q, A]):
    """The `name` on the wire, the struct of a request and that of its answer."""

    name: str
    request: type[Q]
    answer: type[A]

    def read(self, reply: Reply) -> Answer[A]:
        """Return the answer in a reply.

        Raises:
            WireError: It is none of this operation.
        """
        return Answer(read_message(reply.args, self.answer, self.name), reply.frames)


def read_message(fields: Mapping[str, object], kind: type[M], op: str) -> M:
    """Return the struct in `fields`.

    Raises:
        WireError: A field is missing, unknown, of another type or beyond its bounds.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"'{op}': {error}") from None


def fields_of(message: Message) -> dict[str, Any]:
    """Return the fields of a struct as plain values."""
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return fields
