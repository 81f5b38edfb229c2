"""Refusals of the gateway: the error that carries an HTTP status.

Owns this error, and the error of a group whose agents did not bring it to an end. Messages go to strangers:
they name the request and never the contents of this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.states import Reason


class Refusal(AsyncrlError, ValueError):
    """A request that is answered with an error.

    Attributes:
        status: The HTTP status.
        code: One word that a program can branch on.
    """

    def __init__(self, message: str, *, hint: str = "", status: int = 400, code: str = "refused") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        made = partial(type(self), hint=self.hint, status=self.status, code=self.code)
        return made, (self.message,)


class EpisodeFailed(AsyncrlError, RuntimeError):
    """A group of sessions that cannot become a group of trajectories; the message begins with the reason."""

    def __init__(self, message: str, *, hint: str = "", reason: Reason = Reason.ENVIRONMENT) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class NobodyCame(AsyncrlError, RuntimeError):
    """A group of which no agent took a session: its lease goes back, and counts as no attempt."""


def error_body(message: str, status: int, code: str) -> dict[str, dict[str, object]]:
    """Return the body that OpenAI's clients read an error from."""
    return {"error": {"message": message, "type": code, "code": status, "param": None}}


def as_message_error(body: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Return an error's body as Anthropic's clients read it."""
    error = body["error"]
    return {"type": "error", "error": {**error, "details": {"error_code": error["type"]}}}
