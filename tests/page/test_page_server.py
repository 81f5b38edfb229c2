"""Access to the page and its stream, over real HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_runs import make_config, make_snapshot, write_groups, write_rows

from asyncrl.cli.run.client import RunClient
from asyncrl.control.api.access import page_token, page_url
from asyncrl.control.api.server import MAX_CONNECTIONS, MAX_STREAMS, ControlApi, Route
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.snapshot import values_of
from asyncrl.page.http.routes import page_routes
from tests.statuses import snapshot_of
from tests.waiting import wait_for

KEY = "key"
TOKEN = page_token(KEY)
SNAPSHOT: dict[str, Any] = {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path, 5)
    write_groups(tmp_path, 3)
    SNAPSHOT.clear()
    SNAPSHOT.update(make_snapshot())
    return tmp_path


@pytest.fixture
def api(folder: Path) -> Iterator[ControlApi]:
    routes: dict[str, Route] = {
        "GET /status": lambda _: values_of(snapshot_of(SNAPSHOT)),
        "POST /stop": lambda _: {"state": "stopping"},
        **page_routes(lambda: snapshot_of(SNAPSHOT), make_config(folder), folder),
    }
    api = ControlApi(0, KEY, routes)
    yield api
    api.close()


def request(
    api: ControlApi, target: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=60.0)
    connection.request(method, target, headers=headers)
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def open_stream(api: ControlApi) -> socket.socket:
    host, port = api.url.removeprefix("http://").split(":")
    end = socket.socket()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    end.settimeout(10.0)
    end.connect((host, int(port)))
    end.sendall(f"GET /events?token={TOKEN} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return end


def read_until(end: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        chunk = end.recv(65536)
        assert chunk, f"the stream ended before {mark!r}"
        data += chunk
    return data


def test_the_token_opens_the_page_and_its_cookie_the_rest(api: ControlApi) -> None:
    code, headers, body = request(api, page_url("", KEY))
    assert code == 200 and b"<title>asyncrl</title>" in body
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    for path in ("/page.js", "/page.css", "/status"):
        assert request(api, path, Cookie=cookie.partition(";")[0])[0] == 200, path


@pytest.mark.parametrize("path", ["/", "/events", "/page.js", "/metrics", "/health", "/status"])
def test_without_the_token_nothing_is_answered_and_no_cookie_given(api: ControlApi, path: str) -> None:
    for target in (path, f"{path}?token=guess", f"{path}?token="):
        code, headers, body = request(api, target, Cookie="asyncrl_page_1=guess; \x7f=")
        assert code == 401 and "Set-Cookie" not in headers
        assert TOKEN.encode() not in body


def test_the_token_only_reads(api: ControlApi) -> None:
    assert request(api, f"/stop?token={TOKEN}", "POST")[0] == 401
    assert request(api, "/stop", "POST", Authorization=f"Bearer {TOKEN}")[0] == 401
    assert request(api, "/stop", "POST", Authorization=f"Bearer {KEY}")[0] == 200


def test_the_token_does_not_tell_the_key_and_is_another_for_each_run() -> None:
    assert KEY not in TOKEN and page_token("key2") != TOKEN and len(TOKEN) == 32


def test_the_page_runs_its_own_script_only_and_no_other_site_may_hold_it(api: ControlApi) -> None:
    _, headers, body = request(api, f"/?token={TOKEN}")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Content-Type-Options"] == "nosniff"
    assert b"http://" not in body.replace(b"http://www.w3.org", b"") and b"https://" not in body


def test_prometheus_and_probes_may_read_with_the_token(api: ControlApi) -> None:
    code, headers, body = request(api, "/metrics", Authorization=f"Bearer {TOKEN}")
    assert code == 200 and headers["Content-Type"].startswith("text/plain") and b"asyncrl_" in body
    assert request(api, "/health", Authorization=f"Bearer {TOKEN}")[0] == 200
    SNAPSHOT["state"] = "failed"
    assert request(api, "/health", Authorization=f"Bearer {TOKEN}")[0] == 503


def test_a_stream_tells_view_curves_and_rollouts_and_ends_with_the_run(api: ControlApi) -> None:
    end = open_stream(api)
    first = read_until(end, b"event: rollouts")
    events = {name: first.index(f"event: {name}\n".encode()) for name in ("view", "curves", "rollouts")}
    view = json.loads(first[events["view"] :].split(b"\n")[1].removeprefix(b"data: "))
    assert view["run"] == "quickstart" and view["bottleneck"]["node"] == "replicas"
    SNAPSHOT["state"] = "finished"
    read_until(end, b"event: end\n")
    assert end.recv(1) == b""
    end.close()


def test_a_stream_ends_with_the_api(api: ControlApi) -> None:
    end = open_stream(api)
    read_until(end, b"event: rollouts")
    api.close()
    while end.recv(65536):
        pass
    end.close()


def test_many_pages_leave_room_for_the_command_line(api: ControlApi, tmp_path: Path) -> None:
    ends = [open_stream(api) for _ in range(MAX_CONNECTIONS - 4)]
    try:
        answers = [end.recv(12) for end in ends]
        assert answers.count(b"HTTP/1.0 200") == MAX_STREAMS
        assert answers.count(b"HTTP/1.0 503") == len(ends) - MAX_STREAMS
        assert RunClient(RunDir(tmp_path), api.url, KEY, 0).status().state == "running"
    finally:
        for end in ends:
            end.close()


def test_a_reader_that_does_not_read_is_hung_up_on_and_holds_up_nobody(folder: Path) -> None:
    SNAPSHOT["error"] = "x" * (8 << 20)  # more than the sockets take in
    api = ControlApi(
        0, KEY, page_routes(lambda: snapshot_of(SNAPSHOT), make_config(folder), folder), deadline_s=1.0
    )
    slow = open_stream(api)
    wait_for(lambda: b"event: view" in slow.recv(4096, socket.MSG_PEEK))
    SNAPSHOT["error"] = None
    quick = open_stream(api)
    read_until(quick, b"event: rollouts")
    quick.close()
    wait_for(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))
    slow.close()
    api.close()


def test_a_journal_that_cannot_be_read_costs_the_rollouts_and_nothing_else(
    api: ControlApi, folder: Path
) -> None:
    for path in (folder / "buffer" / "payloads").glob("*.segment"):
        path.unlink()
        path.mkdir()
    end = open_stream(api)
    data = read_until(end, b"event: rollouts")
    assert b"the journal cannot be read: IsADirectoryError" in data + end.recv(65536)
    assert b"event: view" in data
    end.close()
