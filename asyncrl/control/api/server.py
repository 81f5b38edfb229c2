"""The control API: HTTP on loopback, one key per run. The CLI's and the page's only way to a live run.

Owns who is let in, how large a body and how many connections may be, and the three forms of an answer:
values as JSON, a text, or a stream of server-sent events. What is answered, the routes know.
Invariant: a connection costs one thread of at most `MAX_CONNECTIONS`; a reader that is too slow is hung
up on after `REQUEST_DEADLINE_S`; nobody else waits for it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import urlsplit

from asyncrl.control.api.access import Gate, NoAccess
from asyncrl.errors import AsyncrlError

MAX_BODY_BYTES = 1 << 16
REQUEST_DEADLINE_S = 10.0
FAREWELL_S = 2.5
"""Two pulses of a stream and some: what a page needs to see how a run ended."""
MAX_CONNECTIONS = 64
"""Each has a thread; further ones are hung up on."""
MAX_STREAMS = 16
"""Of them, streams: however many pages are open, the CLI gets through."""
SENT_WITH_EVERYTHING = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Text:
    """An answer that is not JSON.

    Attributes:
        content_type: With its charset.
        body: UTF-8.
        headers: Further ones.
        code: Of HTTP.
    """

    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    code: int = 200


@dataclass(frozen=True)
class EventStream:
    """An answer that goes on: `follow` yields framed server-sent events, and ends once its event is set."""

    follow: Callable[[threading.Event], Iterator[bytes]]


Answer = dict[str, Any] | Text | EventStream
Route = Callable[[dict[str, Any]], Answer]


class _BoundedServer(ThreadingHTTPServer):
    """Serves at most `MAX_CONNECTIONS` at a time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, key: str, routes: Mapping[str, Route], deadline_s: float) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self.free_streams = threading.BoundedSemaphore(MAX_STREAMS)
        self.is_closing = threading.Event()
        self.routes = routes
        self.deadline_s = deadline_s
        super().__init__(("127.0.0.1", port), _Handler)
        self.gate = Gate(key, self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a peer that hung up."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class ControlApi:
    """Serves `routes` ("GET /status", "POST /stop" ...) in a thread until `close`.

    Args:
        deadline_s: How long a peer may take to send its request, or to take in what it is sent at once.
    """

    def __init__(
        self, port: int, key: str, routes: Mapping[str, Route], deadline_s: float = REQUEST_DEADLINE_S
    ) -> None:
        self._server = _BoundedServer(port, key, routes, deadline_s)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="control-api", daemon=True)
        self._thread.start()

    def await_readers(self, deadline_s: float = FAREWELL_S) -> None:
        """Wait until every open stream has ended by itself, at most so long; no new one is taken after it."""
        end = time.monotonic() + deadline_s
        for _ in range(MAX_STREAMS):
            if not self._server.free_streams.acquire(timeout=max(0.0, end - time.monotonic())):
                return

    def close(self) -> None:
        """End the streams and take no more requests."""
        self._server.is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _Handler(BaseHTTPRequestHandler):
    def setup(self) -> None:
        """Give the connection its deadline."""
        super().setup()
        self.connection.settimeout(self._owner.deadline_s)

    @property
    def _owner(self) -> _BoundedServer:
        return cast(_BoundedServer, self.server)

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        self._send(self._find(method))

    def _find(self, method: str) -> Answer:
        try:
            self._check(method)
            path = urlsplit(self.path).path
            route = self._owner.routes.get(f"{method} {path}")
            return _refusal(404, f"there is no {method} {path}") if route is None else route(self._body())
        except NoAccess as error:
            return _refusal(401, str(error))
        except (ValueError, RecursionError) as error:  # of ours, those that say that the request is wrong
            return _refusal(400, str(error), type(error).__name__)
        except AsyncrlError as error:
            return _refusal(409, str(error), type(error).__name__)

    def _check(self, method: str) -> None:
        authorization, cookies = self.headers.get("Authorization", ""), self.headers.get("Cookie", "")
        self._owner.gate.check(method, self.path, authorization, cookies)

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= MAX_BODY_BYTES:
            raise ValueError(f"a body of {length} bytes is over the limit of {MAX_BODY_BYTES}")
        body = json.loads(self.rfile.read(length) or b"{}")
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        return body

    def _send(self, answer: Answer) -> None:
        if isinstance(answer, EventStream):
            return self._send_stream(answer)
        text = answer if isinstance(answer, Text) else _json_text(200, answer)
        cookie = self._owner.gate.cookie_for(self.path)
        headers = {**text.headers, "Content-Length": str(len(text.body))}
        self._send_head(text.code, text.content_type, headers | ({"Set-Cookie": cookie} if cookie else {}))
        self.wfile.write(text.body)
        return None

    def _send_head(self, code: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": content_type, **SENT_WITH_EVERYTHING, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_stream(self, stream: EventStream) -> None:
        if not self._owner.free_streams.acquire(blocking=False):
            return self._send(_refusal(503, f"{MAX_STREAMS} pages are open already"))
        try:
            self._send_head(200, "text/event-stream; charset=utf-8", {"X-Accel-Buffering": "no"})
            for chunk in stream.follow(self._owner.is_closing):
                self.wfile.write(chunk)  # the socket's timeout ends a reader that does not read
        finally:
            self._owner.free_streams.release()
        return None

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the log is for events of the run, and a path may hold the page's token."""


def _json_text(code: int, value: dict[str, Any]) -> Text:
    return Text("application/json", json.dumps(value).encode(), code=code)


def _refusal(code: int, message: str, kind: str = "") -> Text:
    return _json_text(code, {"error": message, "kind": kind})
