"""The control API over real HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.run import client as api_client
from asyncrl.cli.run.client import NotRunning, RunClient, find_run
from asyncrl.control.api import server
from asyncrl.control.api.server import MAX_BODY_BYTES, MAX_CONNECTIONS, ControlApi
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.snapshot import Snapshot
from asyncrl.core.errors import ConfigError, ConnectionLost, DeadlineExceeded, Refused, RemoteError
from asyncrl.core.states import RunState


def refuse(body: dict[str, Any]) -> dict[str, Any]:
    raise ConfigError(f"replicas must be a whole number, not {body['replicas']}")


def be_ending(body: dict[str, Any]) -> dict[str, Any]:
    raise Refused("the run is stopping")


@pytest.fixture
def api() -> Iterator[ControlApi]:
    routes = {"GET /status": lambda _: {"state": "running"}, "POST /scale": refuse, "POST /pause": be_ending}
    api = ControlApi(0, "key", routes)
    yield api
    api.close()


@pytest.fixture
def client(api: ControlApi, tmp_path: Path) -> RunClient:
    return RunClient(RunDir(tmp_path), api.url, "key", 0)


def test_a_client_reads_the_status(client: RunClient) -> None:
    assert client.status() == Snapshot(state=RunState.RUNNING)


def test_the_key_goes_to_the_run_alone_whatever_proxy_is_set(
    client: RunClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.0)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the environment of its first call
        assert client.status() == Snapshot(state=RunState.RUNNING)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.parametrize(("key", "code"), [("guess", 401), ("key", 400)])
def test_a_target_that_is_no_url_gets_an_answer_and_leaves_nothing_in_the_log(
    api: ControlApi, capfd: pytest.CaptureFixture[str], key: str, code: int
) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as end:
        end.sendall(f"GET http://[ HTTP/1.0\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: end.recv(4096), b""))
    assert answer.startswith(f"HTTP/1.0 {code} ".encode()) and b'"error"' in answer
    assert capfd.readouterr().err == ""


def test_a_refused_command_comes_back_as_its_message_and_its_kind(client: RunClient) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        client.scale(-1)
    with pytest.raises(RemoteError, match="the run is stopping"):
        client.pause()


def test_without_the_key_nothing_is_answered(api: ControlApi, tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="bearer key"):
        RunClient(RunDir(tmp_path), api.url, "guess", 0).status()


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({"Content-Length": str(MAX_BODY_BYTES + 1)}, b"", 400),
        ({}, b"[1, 2]", 400),
        ({}, b"not json", 400),
        ({}, b"[" * 60_000, 400),
        ({"Authorization": "Bearer k\xe9y"}, b"{}", 401),
        ({"Content-Length": "-5"}, b"", 400),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(
    api: ControlApi, headers: dict[str, str], body: bytes, code: int
) -> None:
    connection = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=60.0)
    connection.request("POST", "/scale", body, {"Authorization": "Bearer key", **headers})
    response = connection.getresponse()
    assert response.status == code
    assert "error" in json.loads(response.read())
    connection.close()


@pytest.mark.parametrize(
    "head",
    [
        "Host: evil.example",
        "Host: localhost\r\nHost: evil.example",
        "Content-Length: 0_2",
        "Content-Length: +2",
        "Content-Length: 2\r\nContent-Length: 50",
        "Transfer-Encoding: chunked\r\nContent-Length: 2",
    ],
)
def test_a_head_that_two_readers_could_understand_in_two_ways_is_refused(api: ControlApi, head: str) -> None:
    """Without the guard the command is heard: 409."""
    with connect(
        api, f"POST /pause HTTP/1.1\r\n{head}\r\nAuthorization: Bearer key\r\n\r\n{{}}".encode()
    ) as end:
        assert answer_of(end).startswith(b"HTTP/1.0 400 ")


def test_a_thousand_silent_connections_take_a_bounded_number_of_threads(
    api: ControlApi, client: RunClient
) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    before = threading.active_count()
    ends = [socket.create_connection((host, int(port)), timeout=60.0) for _ in range(1000)]
    try:
        assert threading.active_count() - before <= MAX_CONNECTIONS
    finally:
        for end in ends:
            end.close()
    while threading.active_count() > before:
        time.sleep(0.01)
    assert client.status() == Snapshot(state=RunState.RUNNING)


def connect(api: ControlApi, said: bytes) -> socket.socket:
    host, port = api.url.removeprefix("http://").split(":")
    end = socket.create_connection((host, int(port)), timeout=30.0)
    end.sendall(said)
    return end


def answer_of(end: socket.socket) -> bytes:
    return b"".join(iter(lambda: end.recv(4096), b""))


def test_the_owner_gets_in_while_strangers_hold_every_place(api: ControlApi, client: RunClient) -> None:
    ends = []
    try:
        for _ in range(3):
            ends += [connect(api, b"G") for _ in range(MAX_CONNECTIONS)]
            assert client.status() == Snapshot(state=RunState.RUNNING)
    finally:
        for end in ends:
            end.close()


def test_who_has_shown_the_key_keeps_the_place_whoever_comes(tmp_path: Path) -> None:
    """An answer is in the making while more strangers come than there are places."""
    is_asked, may_answer = threading.Event(), threading.Event()

    def take_time(body: dict[str, Any]) -> dict[str, Any]:
        is_asked.set()
        assert may_answer.wait(60.0)
        return {"done": 1}

    api = ControlApi(0, "key", {"POST /stop": take_time})
    owner = connect(api, b"POST /stop HTTP/1.0\r\nAuthorization: Bearer key\r\n\r\n")
    assert is_asked.wait(60.0)
    ends = [connect(api, b"G") for _ in range(2 * MAX_CONNECTIONS)]
    with connect(api, b"GET / HTTP/1.0\r\n\r\n") as last:
        assert answer_of(last), "those before it have come in"
    may_answer.set()
    assert answer_of(owner).endswith(b'{"done": 1}')
    for end in (owner, *ends):
        end.close()
    api.close()


@pytest.mark.parametrize("key", ["", "key"])
def test_a_request_has_its_time_in_all_and_not_for_each_byte(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Without the key the head never ends, with it the body."""
    head = f"POST /pause HTTP/1.0\r\nContent-Length: 900\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    monkeypatch.setattr(server, "HEAD_DEADLINE_S", 0.3 if not key else 30.0)
    api = ControlApi(0, "key", {"POST /pause": lambda _: {}}, deadline_s=0.3 if key else 30.0)
    end = connect(api, head if key else head[:-4])
    end.settimeout(0.05)
    try:
        assert any(is_hung_up_on(end) for _ in range(200))
    finally:
        end.close()
        api.close()


def is_hung_up_on(end: socket.socket) -> bool:
    """Send one more byte, and look whether the server has closed the connection meanwhile."""
    try:
        end.sendall(b"x")
        return end.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "LOCALHOST:8000", "[::1]:80"])
def test_a_tunnel_to_this_machine_may_have_a_port_of_its_own(api: ControlApi, host: str) -> None:
    head = f"GET /status HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer key\r\n\r\n"
    with connect(api, head.encode()) as end:
        assert answer_of(end).startswith(b"HTTP/1.0 200 ")


@pytest.mark.parametrize("said", [b"GET /status HTTP/1.0", b"PUT / HTTP/1.0"])
def test_a_stranger_learns_no_version(api: ControlApi, said: bytes) -> None:
    with connect(api, said + b"\r\n\r\n") as end:
        answer = answer_of(end)
    assert b"\r\nServer: asyncrl" in answer and b"Python" not in answer


@pytest.mark.parametrize(("is_dropped", "error"), [(False, DeadlineExceeded), (True, ConnectionLost)])
def test_a_command_that_was_heard_and_not_answered_is_not_told_as_a_run_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dropped: bool, error: type[DeadlineExceeded]
) -> None:
    monkeypatch.setattr(api_client, "COMMAND_DEADLINE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = RunClient(RunDir(tmp_path), f"http://127.0.0.1:{deaf.getsockname()[1]}", "key", 0)
        if is_dropped:
            dropper = threading.Thread(target=lambda: deaf.accept()[0].close())
            dropper.start()
            monkeypatch.setattr(api_client, "COMMAND_DEADLINE_S", 10.0)
        with pytest.raises(error, match="may be done all the same"):
            client.pause()
        if is_dropped:
            dropper.join()


def test_an_api_that_is_gone_is_not_running(client: RunClient, api: ControlApi) -> None:
    api.close()
    with pytest.raises(NotRunning):
        client.status()


def test_a_dead_run_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    live = {"run_id": "abcd1234", "key": "k", "sockets": "/nowhere", "pid": 1, "url": "http://127.0.0.1:9"}
    write_json(tmp_path / "old" / "run.json", live)
    with pytest.raises(NotRunning, match="'old' was cut short before its first step: its head process 1"):
        find_run(str(tmp_path), None)
