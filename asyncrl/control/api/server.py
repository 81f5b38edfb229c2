"""The control API: HTTP on loopback, one key per run. The CLI's and the page's only way to a live run.

Owns who is let in, how large a body and how many connections may be, and the three forms of an answer:
values as JSON, a text, or a stream of server-sent events. What is answered, the routes know.
Invariants: a connection costs one thread of at most `MAX_CONNECTIONS`; the head of a request has
`HEAD_DEADLINE_S` in all, its body and a reader of answers `REQUEST_DEADLINE_S`; nobody else waits for them.
Whoever has shown a secret keeps the place; of all others the oldest yields to a newcomer, so that strangers
shut nobody out.
"""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from asyncrl.control.api.access import Gate, NoAccess, check_host
from asyncrl.core.errors import AsyncrlError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_BODY_BYTES = 1 << 16
HEAD_DEADLINE_S = 5.0
REQUEST_DEADLINE_S = 10.0
FAREWELL_S = 2.5
"""Time for a page to receive the end of a run: a little over two pulses of its stream."""
MAX_CONNECTIONS = 64
"""Each has a thread; for a further one the oldest is hung up on that has shown no secret, or it itself."""
YIELD_S = 1.0
"""Time that the thread of a dropped connection has to leave its place."""
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


Answer = dict[str, object] | Text | EventStream
Route = Callable[[dict[str, object]], Answer]

Connection = socket.socket | tuple[bytes, socket.socket]
"""As socketserver has them, which serves datagrams too."""


class _BoundedServer(ThreadingHTTPServer):
    """Serves at most `MAX_CONNECTIONS` at a time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, key: str, routes: Mapping[str, Route], deadline_s: float) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self.free_streams = threading.BoundedSemaphore(MAX_STREAMS)
        self.is_closing = threading.Event()
        self.routes = routes
        self.deadline_s = deadline_s
        super().__init__(("127.0.0.1", port), _Handler)
        self.gate = Gate(key, self.server_address[1])

    def process_request(self, request: Connection, client_address: object) -> None:
        assert isinstance(request, socket.socket), "it listens on TCP"
        has_place = self._free.acquire(blocking=False)
        if not has_place and self._hang_up_on_oldest_stranger():
            has_place = self._free.acquire(timeout=YIELD_S)
        if not has_place:
            self.shutdown_request(request)
            return
        with self._lock:
            self._strangers[request] = None
        super().process_request(request, client_address)

    def admit(self, request: socket.socket) -> None:
        """Let a connection that has shown a secret keep its place."""
        with self._lock:
            self._strangers.pop(request, None)

    def _hang_up_on_oldest_stranger(self) -> bool:
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            del self._strangers[oldest]
            try:
                oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it, and frees the place
            except OSError:
                pass  # it has hung up itself
            return True

    def process_request_thread(self, request: Connection, client_address: object) -> None:
        assert isinstance(request, socket.socket), "it listens on TCP"
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.admit(request)  # forget it
            self._free.release()

    def handle_error(self, request: Connection, client_address: object) -> None:
        """Ignore a peer that hung up."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class ControlApi:
    """Serves `routes` ("GET /status", "POST /stop" ...) in a thread until `close`.

    Args:
        deadline_s: Time that a peer may take to send a body, and for each write of an answer to it.
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


class _TimedReader(io.RawIOBase):
    """Reads from a connection until a deadline, however few bytes come at a time."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection = connection
        self.allow(deadline_s)

    def allow(self, deadline_s: float) -> None:
        """Read for `deadline_s` from now on; each write has as long."""
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s
        self._connection.settimeout(deadline_s)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request is not complete in time")
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(self._deadline_s)


class _Handler(BaseHTTPRequestHandler):
    server_version = "asyncrl"
    sys_version = ""

    def setup(self) -> None:
        """Read under a deadline for the whole head."""
        super().setup()
        self.rfile.close()
        self._reader = _TimedReader(self.connection, HEAD_DEADLINE_S)
        self.rfile = io.BufferedReader(self._reader)

    def parse_request(self) -> bool:
        """Read the head; what follows has a deadline of its own."""
        is_whole = super().parse_request()
        self._reader.allow(self._owner.deadline_s)
        return is_whole

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
        check_host(self.headers.get_all("Host", []))
        authorization, cookies = self.headers.get("Authorization", ""), self.headers.get("Cookie", "")
        self._owner.gate.check(method, self.path, authorization, cookies)
        self._owner.admit(self.connection)

    def _body(self) -> dict[str, object]:
        length = self._body_length()
        body = json.loads(self.rfile.read(length) or b"{}")
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        return body

    def _body_length(self) -> int:
        """Return how many bytes follow the head.

        Raises:
            ValueError: They are too many, or the head is not clear about it.
        """
        told = self.headers.get_all("Content-Length", ["0"])
        is_clear = len(told) == 1 and told[0].isascii() and told[0].isdigit()
        if not is_clear or "Transfer-Encoding" in self.headers:
            raise ValueError("the length of a body is told by one Content-Length and no Transfer-Encoding")
        if int(told[0]) > MAX_BODY_BYTES:
            raise ValueError(f"a body of {told[0]} bytes is over the limit of {MAX_BODY_BYTES}")
        return int(told[0])

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

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the log is for events of the run, and a path may hold the page's token."""


def _json_text(code: int, value: dict[str, object]) -> Text:
    return Text("application/json", json.dumps(value).encode(), code=code)


def _refusal(code: int, message: str, kind: str = "") -> Text:
    return _json_text(code, {"error": message, "kind": kind})
