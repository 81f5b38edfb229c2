"""The table of a service: a handler for each operation (`asyncrl.core.rpc.message`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.core.errors import WireError
from asyncrl.core.rpc.message import A, Answer, Operation, Q, fields_of, read_message
from asyncrl.core.rpc.request import Request


def send_answer(request: Request, answer: Answer[Any]) -> None:
    """Answer a request now."""
    request.reply(answer.frames, **fields_of(answer.message))


class Operations:
    """Handlers of a service, one for each operation.

    Args:
        who: Names the service in refusals, as in `the buffer`.
        answer: Sends an answer, now or later.
    """

    def __init__(self, who: str, answer: Callable[[Request, Answer[Any]], None] = send_answer) -> None:
        self._who = who
        self._answer = answer
        self._table: dict[str, Callable[[Request], None]] = {}

    def add(self, operation: Operation[Q, A], do: Callable[[Request, Q], Answer[A] | A | None]) -> None:
        """Let `do` handle an operation; it returns the answer, or None where that comes later."""

        def handle(request: Request) -> None:
            found = do(request, read_message(request.args, operation.request, operation.name))
            if found is not None:
                self._answer(request, found if isinstance(found, Answer) else Answer(found))

        self._table[operation.name] = handle

    def names(self) -> frozenset[str]:
        """Return the names of all operations."""
        return frozenset(self._table)

    def handle(self, request: Request) -> None:
        """Handle one request.

        Raises:
            WireError: There is no such operation, or the request is none of it.
        """
        found = self._table.get(request.op)
        if found is None:
            raise WireError(f"{self._who} knows no operation '{request.op}'")
        found(request)
