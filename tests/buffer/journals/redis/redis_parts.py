"""A Redis whose administrator the test is, and a wire to it that can be cut."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from asyncrl.buffer.journals.redis.link import LinkDown, RedisLink, find_server
from asyncrl.buffer.journals.redis.past import Past, asking, keys_of, read_living
from asyncrl.core.runtime.threads import ThreadEvent
from tests.buffer.journals.journal_parts import raw_link


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def plain_redis(folder: Path, *options: str, port: int = 0) -> Iterator[str]:
    """Run a server without users, configured by `options`; yield its URL."""
    port = port or free_port()
    command = [find_server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        await_answer(url)
        yield url
    finally:
        process.kill()
        process.wait(60.0)


def read_run(url: str, run: str) -> Past:
    """Return what the journal of `run` holds, as whoever looks at it reads it."""
    with asking(url) as (ask, label):
        return read_living(ask, keys_of(run), label)


def await_answer(url: str) -> None:
    end = time.monotonic() + 60.0
    while True:
        try:
            with raw_link(url) as link:
                link.call("PING")
            return
        except LinkDown:
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.01)


def administer(url: str, *commands: tuple[str, ...]) -> None:
    with raw_link(url) as link:
        for command in commands:
            link.call(*command)


class Wire:
    """A TCP connection to Redis through which bytes pass, until it is told to lose the answers.

    `url` leads to it. After `lose_answers`, requests still reach Redis; the first answer that comes
    back cuts the connection instead. Connections after that are whole again.
    """

    def __init__(self, url: str) -> None:
        host, _, port = RedisLink(url).label.removeprefix("redis://").partition("/")[0].partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        port_here = self._listener.getsockname()[1]
        self.url = url.replace(f":{port}/", f":{port_here}/")
        self._loses = ThreadEvent()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answers(self) -> None:
        self._loses.set()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for pair in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_answer and self._loses.is_set():
                    time.sleep(0.05)  # Redis has done it all by now
                    self._loses.clear()
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
