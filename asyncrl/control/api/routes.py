"""Routes of the control API for its operations: a request is read from JSON, its answer written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.control.api import operations as api
from asyncrl.control.api.server import Answer, Route
from asyncrl.core.errors import ConfigError, WireError
from asyncrl.core.rpc.message import M, Message, Operation, Q, fields_of, read_message


def operation_routes(perform: Callable[[api.AnyRequest], Message]) -> dict[str, Route]:
    """Return a route for each operation, `POST /<name>`; `perform` does what is asked."""
    return {
        **_route(api.SCALE, perform),
        **_route(api.DRAIN, perform),
        **_route(api.PAUSE, perform),
        **_route(api.UNPAUSE, perform),
        **_route(api.CHECKPOINT, perform),
        **_route(api.TIGHTEN, perform),
        **_route(api.STOP, perform),
    }


def _route(operation: Operation[Q, M], perform: Callable[[Q], Message]) -> dict[str, Route]:
    def answer(body: Mapping[str, object]) -> Answer:
        try:
            asked = read_message(body, operation.request, operation.name)
        except WireError as error:
            raise ConfigError(error.message) from error
        return fields_of(perform(asked))

    return {f"POST /{operation.name}": answer}
