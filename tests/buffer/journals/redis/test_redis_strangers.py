"""Another user of the machine where a private Redis listened, or is about to: he learns no password."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.buffer.journals.redis.link import OWN, LinkDown, RedisLink, find_listener
from asyncrl.buffer.journals.redis.server import RedisServer
from tests.other_user import CHECKOUT, NOBODY, command_as

LISTEN = """
import socket, sys
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
while True:
    try:
        listening.bind(("127.0.0.1", int(sys.argv[1])))
        listening.listen()
        break
    except OSError:
        continue
print("listening", flush=True)
while True:
    end, _ = listening.accept()
    end.settimeout(2.0)
    try:
        said = end.recv(4096)
    except OSError:
        said = b""
    print(said, flush=True)
"""
"""Takes a port as soon as it can, and tells what each who connects says first."""


class Stranger:
    """Another user who takes a port as soon as it is free."""

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            command_as(NOBODY, sys.executable, "-c", LISTEN, str(port)), stdout=-1, text=True, cwd=CHECKOUT
        )

    def await_port(self) -> None:
        assert self._process.stdout is not None and self._process.stdout.readline() == "listening\n"

    def leave(self) -> str:
        """Go, and return what he was told."""
        time.sleep(0.5)
        self._process.kill()
        return self._process.communicate(timeout=60.0)[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis")
    made.ensure()
    yield made
    made.stop()


def port_of(server: RedisServer) -> int:
    return int(server.url.rpartition(":")[2].partition("/")[0])


def test_the_kernel_says_whose_socket_listens(server: RedisServer) -> None:
    found = find_listener(port_of(server))
    assert found is not None and found.uid == os.geteuid()
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert find_listener(other.getsockname()[1]) != found


def test_who_takes_the_port_of_a_redis_that_died_is_told_no_password(server: RedisServer) -> None:
    url, pid, port = server.url, server.pid, port_of(server)
    link = RedisLink(url)
    link.connect()
    assert link.call("PING") == b"PONG"
    link.close()
    stranger = Stranger(port)
    try:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        stranger.await_port()
        with pytest.raises(LinkDown, match=f"another user .uid {NOBODY}. listens at 127.0.0.1:{port}"):
            link.connect()
        assert server.ensure(), "on another port"
        assert port_of(server) != port
        again = RedisLink(server.url)
        again.connect()
        assert again.call("PING") == b"PONG"
        again.close()
    finally:
        told = stranger.leave()
    assert "AUTH" not in told and url.split(":")[2].split("@")[0] not in told, told


def test_a_redis_of_the_users_own_choice_may_be_anybodys(server: RedisServer) -> None:
    assert server.url.endswith(f"#{OWN}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    stranger = Stranger(port)
    stranger.await_port()
    with pytest.raises(LinkDown) as caught:
        RedisLink(f"redis://user:word@127.0.0.1:{port}/0", 1.0).connect()
    assert "another user" not in str(caught.value) and "AUTH" in stranger.leave()
