"""One call as each side sees it, and the protocol of a service's handler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.core import wire
from asyncrl.core.errors import BY_NAME, AsyncrlError, RemoteError, WireError, WrongVersion
from asyncrl.core.rpc.message import Reply
from asyncrl.core.runtime.interface import Arrival
from asyncrl.core.sockets.keys import Role

MAX_OP_CHARACTERS = 64
MAX_ERROR_CHARACTERS = 4000
"""Of a message or a hint: what a request holds must not come back at full length."""


@dataclass
class Request:
    """One call that arrived; answer it once, now or later.

    Attributes:
        sent_s: Send time by the caller's monotonic clock; None if the caller gave none.
        within_s: Time from then that the caller waits for the answer.
        lay_s: Time in the queue before it was read, at least (`asyncrl.core.rpc.server`).
        role: Of the caller, by its key; `SERVICE` for every caller of a server without keys.
    """

    op: str
    args: dict[str, Any]
    frames: list[wire.Frame]
    client: bytes
    id: int
    _answer: Callable[[Sequence[wire.Frame]], None] = field(repr=False)
    is_answered: bool = False
    sent_s: float | None = None
    within_s: float = math.inf
    lay_s: float = 0.0
    role: Role = Role.SERVICE

    @property
    def patience_s(self) -> float:
        """Time that the caller still waits, at most, when this was read; at 0 or below it has given up."""
        return self.within_s - self.lay_s

    def reply(self, frames: Sequence[wire.Frame] = (), **args: Any) -> None:
        """Send the result."""
        self._send({"id": self.id, "ok": True, "args": args}, frames)

    def fail(self, error: AsyncrlError) -> None:
        """Send an error, which the caller sees raised with the same class."""
        said = {"message": error.message, "hint": error.hint}
        said = {name: text[:MAX_ERROR_CHARACTERS] for name, text in said.items()}
        self._send({"id": self.id, "ok": False, "kind": type(error).__name__, **said})

    def _send(self, header: dict[str, Any], frames: Sequence[wire.Frame] = ()) -> None:
        assert not self.is_answered, f"request '{self.op}' was answered twice"
        self.is_answered = True
        self._answer([wire.pack_header(header, wire.RPC_VERSION), *frames])


class Handler(Protocol):
    """Handler of a service's requests and timers, in the server's one thread.

    Invariant: between two calls nothing happens to it, so `wake_at` is asked for once per wait.
    """

    def handle(self, request: Request) -> None: ...

    def wake_at(self) -> float:
        """Return when `tick` has something to do, by the runtime's clock; infinite while nothing is due."""

    def tick(self, now: float) -> None:
        """Do what is due. Also called when nothing is."""


def pack_request(call_id: int, op: str, args: dict[str, Any], now: float, within_s: float) -> bytes:
    """Return the header of a call whose answer is awaited for `within_s` from `now`."""
    times = {"sent_s": now, "within_s": float(within_s)}
    return wire.pack_header({"id": call_id, "op": op, "args": args, **times}, wire.RPC_VERSION)


def read_request(arrival: Arrival) -> Request:
    """Return the request in a message: a header, frames.

    Raises:
        WireError: It has no header, or the header is not one of a request.
    """
    if not arrival.parts:
        raise WireError("a message without a header")
    fields = wire.unpack_header(arrival.parts[0], wire.MAX_REQUEST_BYTES, wire.RPC_VERSION)
    op, call_id = wire.field(fields, "op", str), wire.field(fields, "id", int)
    if len(op) > MAX_OP_CHARACTERS:
        raise WireError(f"an operation's name has {len(op)} characters, allowed are {MAX_OP_CHARACTERS}")
    sent_s, within_s = _read_times(fields)
    return Request(
        op=op,
        args=wire.field(fields, "args", dict),
        frames=arrival.parts[1:],
        client=arrival.caller,
        id=call_id,
        _answer=arrival.answer,
        sent_s=sent_s,
        within_s=within_s,
        role=arrival.role,
    )


def refuse_version(arrival: Arrival, error: WrongVersion) -> None:
    """Tell a caller of another version so, in its own: it would wait for an answer until its deadline."""
    try:
        fields = wire.unpack_map(arrival.parts[0], "header", wire.MAX_REQUEST_BYTES)
        call_id, version = wire.field(fields, "id", int), wire.field(fields, "v", int)
    except WireError:
        return  # not even that of another version
    said = {"message": error.message, "hint": error.hint}
    header = {"id": call_id, "ok": False, "kind": WireError.__name__, **said}
    arrival.answer([wire.pack_header(header, version)])


def _read_times(fields: dict[str, Any]) -> tuple[float | None, float]:
    """Return `sent_s` and `within_s` of a header; callers of other makers may leave them out."""
    if "sent_s" not in fields:
        return None, math.inf
    sent_s, within_s = wire.field(fields, "sent_s", float), wire.field(fields, "within_s", float)
    if not math.isfinite(sent_s) or math.isnan(within_s):
        raise WireError("a request was sent at no time, or waits for none")
    return sent_s, within_s


def read_reply(message: list[wire.Frame]) -> tuple[int, Reply | AsyncrlError]:
    """Return the call's id and what it returned, or the error that it raised.

    Raises:
        WireError: The message is no reply.
    """
    fields = wire.unpack_header(message[0], version=wire.RPC_VERSION)
    call_id = wire.field(fields, "id", int)
    if wire.field(fields, "ok", bool):
        return call_id, Reply(wire.field(fields, "args", dict), message[1:])
    error_class = BY_NAME.get(wire.field(fields, "kind", str), RemoteError)
    return call_id, error_class(wire.field(fields, "message", str), hint=wire.field(fields, "hint", str))
