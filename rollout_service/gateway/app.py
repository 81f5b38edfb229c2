"""The gateway's routes: vLLM's own serving of models and of four APIs, and sessions around it.

    POST /sessions                {"wait_s": 5}               -> a prompt, a session key, a deadline
    POST /v1/chat/completions, /v1/completions, /v1/responses    as OpenAI's, with the session key
    GET  /v1/models                                              likewise
    POST /v1/messages, /v1/messages/count_tokens                 as Anthropic's, likewise
    POST /reward                  {"reward": 1.0, "parts": {}}   closes the episode; {"error": "…"} the group
    GET  /health

All but the first and the last also stand under `/sessions/<session key>`, for agents that know a `base_url`
and no key. Owns what is read from strangers. Must never add a route of vLLM's besides those: its development
routes change weights. Invariant: a body is read up to `MAX_BODY_BYTES` and within `BODY_DEADLINE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from asyncrl.core.states import FAILURES, Reason
from rollout_service.gateway.conversation.session import Call, Session
from rollout_service.gateway.keys import GatewayKey
from rollout_service.gateway.refusal import EpisodeFailed, Refusal, as_message_error, error_body
from rollout_service.gateway.server import admit_connection
from rollout_service.gateway.sessions import SessionManager
from rollout_service.rewards.score import as_reason

if TYPE_CHECKING:
    from rollout_service.gateway.serving.apis import Kind, Serving

MAX_BODY_BYTES = 4 << 20
BODY_DEADLINE_S = 10.0
DEFAULT_WAIT_S = 5.0
MAX_WAIT_S = 60.0
MAX_REASON_CHARS = 200
RETRY_AFTER_S = 1
SESSION = "/sessions/{key}"
MESSAGES = "/v1/messages"
CALLS: Mapping[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
    MESSAGES: "messages",
}
"""Paths of the calls that a model answers."""

Body = dict[str, object]
Chunk = TypeVar("Chunk")


class Held(Response):
    """A response whose call ends with it, however it ends: also when its client hangs up."""

    def __init__(self, response: Response, call: Call) -> None:
        self._response = response
        self._call = call
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._call.end()


@dataclass(frozen=True)
class Routes:
    """The handlers. `url`: where agents reach this gateway; `is_healthy`: whether the engine can go on."""

    manager: SessionManager
    serving: Serving
    key: GatewayKey
    url: Callable[[], str]
    is_healthy: Callable[[], bool]

    async def health(self, request: Request) -> Response:
        is_healthy = self.is_healthy()
        return JSONResponse({"healthy": is_healthy}, status_code=200 if is_healthy else 503)

    async def open_session(self, request: Request) -> Response:
        if not self.key.admits(_bearer(request)):
            raise Refusal("the bearer key is missing or wrong", status=401, code="unauthorized")
        admit_connection(request)
        body = await read_body(request)
        wait_s = _number(body.get("wait_s", DEFAULT_WAIT_S), "wait_s")
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise Refusal(f"'wait_s' must be from 0 to {MAX_WAIT_S:g}")
        session = await self._open_for(request, wait_s)
        return Response(status_code=499) if session is None else _json_response(self._describe(session))

    async def models(self, request: Request) -> Response:
        self._session(request)
        models = await request.app.state.openai_serving_models.show_available_models()
        return JSONResponse(models.model_dump())

    async def count_tokens(self, request: Request) -> Response:
        self._session(request)
        body = await read_body(request)
        return await self.serving.answer("count_tokens", body, None, request) or Response(status_code=499)

    async def call(self, kind: Kind, request: Request) -> Response:
        """Answer a call of a session's model."""
        await self.manager.await_return(_key(request))
        self._session(request)
        body = await read_body(request)
        call = self._session(request).begin()
        is_answered = False
        try:
            response = await self.serving.answer(kind, body, call, request) or Response(status_code=499)
            if isinstance(response, StreamingResponse):
                response.body_iterator = _kept(response.body_iterator, call)
            else:
                await call.keep()
            is_answered = True
        finally:
            if not is_answered:
                call.end()
        return Held(response, call)

    async def reward(self, request: Request) -> Response:
        await self.manager.await_return(_key(request))
        self._session(request)
        body = await read_body(request)
        session = self._session(request)  # its group may have ended meanwhile
        why = str(body.get("reason") or "")
        if (error := body.get("error")) or why in FAILURES:
            if why and why not in FAILURES:
                raise Refusal("'reason' of an error is one of " + ", ".join(FAILURES))
            what = f"agent_failed: session {session.id}: {str(error or why)[:MAX_REASON_CHARS]}"
            session.group.fail(EpisodeFailed(what, reason=Reason(why or Reason.ENVIRONMENT)))
            return JSONResponse({"closed": True})
        if "reward" not in body:
            raise Refusal("'reward' is missing", hint="Send a number, or 'error' with what went wrong")
        number = _number(body["reward"], "reward")
        session.close(number, _parts(body.get("parts") or {}), as_reason(why) if number <= 0 else "")
        await session.keep_reward()
        return JSONResponse({"closed": True})

    async def _open_for(self, request: Request, wait_s: float) -> Session | None:
        """Return a new session; None, and nothing is held, if the client hung up while it waited."""
        opening = asyncio.ensure_future(self.manager.open(wait_s))
        leaving = asyncio.ensure_future(_hang_up(request))
        try:
            await asyncio.wait([opening, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not leaving.done():
                return await opening
        finally:
            leaving.cancel()
            opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            self.manager.take_back(opening.result())
        return None

    def _session(self, request: Request) -> Session:
        session = self.manager.find(_key(request))
        admit_connection(request)
        return session

    def _describe(self, session: Session) -> Body:
        group, prompt = session.group, session.group.prompt.prompt
        return {
            "session": session.id,
            "key": session.key,
            "base_url": f"{self.url()}/sessions/{session.key}/v1",
            "anthropic_base_url": f"{self.url()}/sessions/{session.key}",
            "ticket": group.grant.ticket,
            "sample": session.sample,
            "deadline_s": self.manager.remaining_s(session),
            "prompt": prompt.content,
            "ground_truth": prompt.ground_truth,
            "data_source": prompt.data_source,
            "extra_info": dict(prompt.extra_info),
        }


def build_app(routes: Routes) -> FastAPI:
    """Return the app; `app.state` still needs vLLM's serving objects."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/sessions", routes.open_session, methods=["POST"])
    for prefix in ("", SESSION):
        app.add_api_route(f"{prefix}/reward", routes.reward, methods=["POST"])
        app.add_api_route(f"{prefix}/v1/models", routes.models, methods=["GET"])
        app.add_api_route(f"{prefix}{MESSAGES}/count_tokens", routes.count_tokens, methods=["POST"])
        for path, kind in CALLS.items():
            app.add_api_route(f"{prefix}{path}", _handler(routes, kind), methods=["POST"])
    app.add_exception_handler(Refusal, _refuse)
    app.add_exception_handler(404, _no_route)
    return app


def _handler(routes: Routes, kind: Kind) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of one API's calls; FastAPI reads the parameters of a handler as the request's."""

    async def handle(request: Request) -> Response:
        return await routes.call(kind, request)

    return handle


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else {}
    body = error_body(str(error), error.status, error.code)
    return JSONResponse(
        as_message_error(body) if MESSAGES in request.url.path else body, error.status, headers
    )


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer a path that is none of the routes; the path is not repeated, it may hold a session key."""
    routes = ", ".join((*CALLS, f"{MESSAGES}/count_tokens and /v1/models"))
    refusal = Refusal(f"there is no such route: the gateway has {routes}", status=404, code="not_found")
    return await _refuse(request, refusal)


async def _hang_up(request: Request) -> None:
    """Return when the client has gone; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request) -> Body:
    """Return the JSON object of a request.

    Raises:
        Refusal: It is too long or too slow, is not called JSON, is none, or holds text without a UTF-8 form.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal("the content type must be application/json", status=415)
    chunks, num_bytes = [], 0
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > MAX_BODY_BYTES:
                    raise Refusal(f"the body is over the limit of {MAX_BODY_BYTES} bytes", status=413)
                chunks.append(chunk)
    except TimeoutError:
        raise Refusal(f"the body did not come within {BODY_DEADLINE_S:g} s", status=408) from None
    try:
        text = b"".join(chunks).decode() or "{}"
        body = json.loads(text)
        if "\\u" in text:  # an escape can make half of a surrogate pair, which no message can carry on
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise Refusal("the body is not JSON in UTF-8") from None
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    return body


async def _kept(chunks: AsyncIterable[Chunk], call: Call) -> AsyncIterator[Chunk]:
    """Pass a stream on; its end waits until the answer is recorded."""
    async for chunk in chunks:
        if call.is_answered:
            await call.keep()
        yield chunk


def _key(request: Request) -> str:
    """Return the session key of a request."""
    return request.path_params.get("key") or _bearer(request)


def _bearer(request: Request) -> str:
    """Return the key of a request; Anthropic's clients have a header of their own for it."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _number(value: object, name: str) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float):
        with contextlib.suppress(OverflowError):  # an int may have any number of digits
            if math.isfinite(number := float(value)):
                return number
    raise Refusal(f"'{name}' must be a finite number")


def _parts(parts: object) -> Mapping[str, float]:
    if not isinstance(parts, dict):
        raise Refusal("'parts' must be an object of numbers by name")
    return {name: _number(value, f"parts.{name}"[:MAX_REASON_CHARS]) for name, value in parts.items()}


def _json_response(body: Body) -> Response:
    """Return a response of what a data file holds, which may be more than JSON knows."""
    return Response(json.dumps(body, default=str), media_type="application/json")
