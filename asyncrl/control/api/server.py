"""The control API: HTTP on loopback, one bearer key per run. The CLI's only way to a live run.

GET /status -> snapshot; GET /weights -> who serves which version; POST /scale {"replicas": n};
POST /tighten {"max_lag": n}; POST /stop. Bodies are small and bounded.
"""

from __future__ import annotations

import hmac
import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from asyncrl.errors import AsyncrlError

MAX_BODY_BYTES = 1 << 16
REQUEST_DEADLINE_S = 10
MAX_CONNECTIONS = 64
"""Each has a thread; further ones are hung up on."""

Route = Callable[[dict[str, Any]], dict[str, Any]]


class _BoundedServer(ThreadingHTTPServer):
    """Serves at most `MAX_CONNECTIONS` at a time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(("127.0.0.1", port), handler)

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
    """Serves `routes` ("GET /status", "POST /stop" ...) in a thread until `close`."""

    def __init__(self, port: int, key: str, routes: dict[str, Route]) -> None:
        handler = type("Handler", (_Handler,), {"key": key, "routes": routes})
        self._server = _BoundedServer(port, handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="control-api", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _Handler(BaseHTTPRequestHandler):
    key: str
    routes: dict[str, Route]
    timeout = REQUEST_DEADLINE_S

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            return self._send(401, {"error": "the bearer key is missing or wrong"})
        route = self.routes.get(f"{method} {self.path}")
        if route is None:
            return self._send(404, {"error": f"there is no {method} {self.path}"})
        try:
            self._send(200, route(self._body()))
        except (AsyncrlError, ValueError, RecursionError) as error:
            self._send(400, {"error": str(error)})

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= MAX_BODY_BYTES:
            raise ValueError(f"a body of {length} bytes is over the limit of {MAX_BODY_BYTES}")
        body = json.loads(self.rfile.read(length) or b"{}")
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        return body

    def _send(self, code: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the log is for events of the run."""
