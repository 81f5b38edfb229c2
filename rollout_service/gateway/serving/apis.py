"""The APIs that agents speak, each with vLLM's form of a request and its handler.

Owns the way of a request into vLLM and of vLLM's errors out. Invariant: each request is checked by vLLM's own
form, so it is refused for its form where vLLM's server refuses it, and only there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from vllm.entrypoints.anthropic.api_router import count_tokens, create_messages
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    AnthropicToolChoice,
)
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve import create_error_response

from rollout_service.gateway.conversation.session import Call
from rollout_service.gateway.refusal import Refusal, as_message_error
from rollout_service.gateway.rules import find_replaced
from rollout_service.gateway.serving.recorded import CALL, MODEL
from rollout_service.gateway.sessions import SessionManager

log = logging.getLogger(__name__)

Kind = Literal["chat", "completion", "responses", "messages", "count_tokens"]
OVERRIDDEN = "x-asyncrl-overridden"
"""The header that names the fields of a request that the run's values replaced."""


class Field(Protocol):
    """A field of a form."""

    def get_default(self, *, call_default_factory: bool) -> object:
        """Return its value in a request that leaves it out."""


class Form(Protocol):
    """vLLM's form of a request."""

    model_fields: ClassVar[Mapping[str, Field]]
    tools: object
    tool_choice: object

    @classmethod
    def model_validate(cls, values: dict[str, object], /) -> Self: ...


@dataclass(frozen=True)
class Api:
    """One API.

    Attributes:
        form: vLLM's class of its requests.
        create: vLLM's handler, which returns None if the client has gone.
        free_choice: Value of `tool_choice` that leaves the choice to the model.
        no_choice: Value that has no tool call parsed.
    """

    form: type[Form]
    create: Callable[[Form, Request], Awaitable[Response | None]]
    free_choice: object = "auto"
    no_choice: object = "none"


APIS: Mapping[Kind, Api] = {
    "chat": Api(ChatCompletionRequest, create_chat_completion),
    "completion": Api(CompletionRequest, create_completion),
    "responses": Api(ResponsesRequest, create_responses),
    "messages": Api(AnthropicMessagesRequest, create_messages, None, AnthropicToolChoice(type="none")),
    "count_tokens": Api(AnthropicCountTokensRequest, count_tokens, None, AnthropicToolChoice(type="none")),
}


class Serving:
    """vLLM's handlers, which find their serving objects in `app.state`.

    Args:
        has_tools: Whether a parser reads tool calls.
    """

    def __init__(self, manager: SessionManager, has_tools: bool) -> None:
        self._manager = manager
        self._has_tools = has_tools

    async def answer(
        self, kind: Kind, body: Mapping[str, object], call: Call | None, raw_request: Request
    ) -> Response | None:
        """Return vLLM's answer; None if the client has gone.

        Raises:
            Refusal: The gateway refuses the call.
        """
        api = APIS[kind]
        if kind == "messages" and body.get("thread"):  # Anthropic's client then sends the whole conversation
            what = "'thread' cannot be taken: the gateway keeps no conversation for its client"
            raise Refusal(what, hint="Send all messages", code="thread_unsupported_request")
        token = CALL.set(call)
        try:
            request = api.form.model_validate({**body, "model": MODEL})
            replaced = self._replace(api, request, body)
            response = await api.create(request, raw_request)
        except Refusal:
            raise
        except Exception as error:  # vLLM's serving raises its own classes and others'; it sorts them itself
            said = create_error_response(error)
            return self._refused(kind, JSONResponse(said.model_dump(), status_code=said.error.code))
        finally:
            CALL.reset(token)
        if call is not None and call.refusal is not None:
            raise call.refusal
        if response is None:
            return None
        if response.status_code >= 400:
            return self._refused(kind, response)
        if replaced:
            response.headers[OVERRIDDEN] = ", ".join(replaced)
        return response

    def _replace(self, api: Api, request: Form, body: Mapping[str, object]) -> tuple[str, ...]:
        """Put the run's values in the place of the request's, and return the names of those fields."""
        fields = api.form.model_fields
        replaced = find_replaced(body, fields.keys(), self._manager.rules)
        for name in fields.keys() & replaced:
            setattr(request, name, fields[name].get_default(call_default_factory=True))
        if "tool_choice" in replaced:
            request.tool_choice = api.free_choice
        if not self._has_tools and getattr(request, "tools", None):
            request.tool_choice = api.no_choice
        self._manager.overridden.update(replaced)
        return replaced

    def _refused(self, kind: Kind, response: Response) -> Response:
        self._manager.counters["calls_refused"] += 1
        said = json.loads(bytes(response.body))
        log.info("a call was refused: %s", said["error"]["message"])
        is_message = kind in ("messages", "count_tokens")
        return JSONResponse(as_message_error(said), response.status_code) if is_message else response
