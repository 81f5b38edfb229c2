"""The budget of a judge, which replicas and starts of a run share."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.system.parts.up_run import UpRun

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
MAX_CALLS, CONCURRENCY = 150, 16


@contextlib.contextmanager
def judging(calls: list[str]) -> Iterator[str]:
    """Serve a judge that gives every answer half of the points, and notes that it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            calls.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"choices": [{"message": {"content": "score: 5"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_judges_budget_is_that_of_all_replicas_and_starts_of_a_run(up: Callable[..., UpRun]) -> None:
    calls: list[str] = []
    with judging(calls) as url:
        limits = f"max_calls: {MAX_CALLS}, concurrency: {CONCURRENCY}, cache: 1"
        judge = f"{{fn: judge, base_url: '{url}', model: m, {limits}}}"
        changes = (f"reward.fn={judge}", "eval.every_steps=0", "learner.steps=100000")
        code, output = up("judge_budget", *changes).finish()
        assert code == 1 and f"max_calls is {MAX_CALLS}" in output, output
        num_calls = len(calls)  # the end of the run cancels some that were counted
        assert MAX_CALLS - 2 * CONCURRENCY <= num_calls <= MAX_CALLS
        code, output = up("judge_budget", *changes).finish()
        assert code == 1 and f"max_calls is {MAX_CALLS}" in output, output
        assert len(calls) == num_calls
