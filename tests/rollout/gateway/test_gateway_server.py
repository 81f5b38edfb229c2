"""The gateway's HTTP server without an engine: idle connections, and who gets in beside them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import httpx
import pytest

from rollout_service.gateway import server
from rollout_service.gateway.gateway import LOOPBACK, _listen
from rollout_service.gateway.server import make_server
from rollout_service.gateway.sessions import SessionManager
from tests.rollout.gateway.test_gateway_rules import GRANT, make_app, make_desk

HEAD = b"POST /sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Type: application/json\r\n"
Script = Callable[[SessionManager, "Visitor"], Awaitable[None]]


class Visitor:
    """Opens connections to a server that listens on `port`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, said: bytes = b"", host: str = "127.0.0.1") -> asyncio.StreamReader:
        """Return the reading end of a connection from an address of this machine."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(host, 0))
        self._writers.append(writer)
        writer.write(said)
        await writer.drain()
        return reader

    async def trickle(self) -> bytes:
        """Send a head a letter at a time until the server hangs up; return what it said."""
        reader = await self.connect(HEAD)
        writer = self._writers[-1]
        while not reader.at_eof() and reader.exception() is None:
            writer.write(b"x")
            await asyncio.sleep(0.02)
        return await read_end(reader)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=60.0)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


async def read_end(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the server hangs up."""
    try:
        return await asyncio.wait_for(reader.read(), 60.0)
    except ConnectionError:
        return b""


def serve(script: Script) -> None:
    """Run `script(manager, visitor)` beside the real server."""

    async def run() -> None:
        manager, _ = make_desk(deadline_s=600.0)
        listener = socket.create_server(("127.0.0.1", 0))
        running = make_server(make_app(manager), 2.0)
        serving = asyncio.create_task(running.serve(sockets=[listener]))
        while not running.started:
            await asyncio.sleep(0.01)
        visitor = Visitor(listener.getsockname()[1])
        try:
            await script(manager, visitor)
        finally:
            visitor.close()
            running.should_exit = True
            await serving

    asyncio.run(run())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 64)
    monkeypatch.setattr(server, "MAX_STRANGERS", 16)
    monkeypatch.setattr(server, "HEAD_DEADLINE_S", 600.0)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nAuthorization: Bearer no\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["nothing", "a wrong key", "health"],
)
def test_an_agent_gets_in_whatever_strangers_hold_open(said: bytes) -> None:
    async def script(manager: SessionManager, visitor: Visitor) -> None:
        readers = [await visitor.connect(said) for _ in range(200)]
        if said:
            assert await asyncio.wait_for(readers[-1].readline(), 60.0)
        group = asyncio.create_task(manager.run(GRANT))
        async with visitor.client() as client:
            assert (await client.post("/sessions", json={})).status_code == 200
        group.cancel()

    serve(script)


def test_a_connection_without_a_key_ends_at_its_deadline_and_one_with_a_key_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "HEAD_DEADLINE_S", 1.0)

    async def script(manager: SessionManager, visitor: Visitor) -> None:
        group = asyncio.create_task(manager.run(GRANT))
        agent = await visitor.connect(HEAD + b"\r\n{}")
        assert (await agent.readline()).startswith(b"HTTP/1.1 200 ")
        assert b"200" not in await asyncio.wait_for(visitor.trickle(), 60.0)
        visitor._writers[0].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"healthy" in await asyncio.wait_for(agent.readuntil(b'"healthy"'), 60.0)
        group.cancel()

    serve(script)


def test_the_address_with_the_most_strangers_loses_its_oldest() -> None:
    async def script(manager: SessionManager, visitor: Visitor) -> None:
        slow = await visitor.connect(HEAD)
        crowd = [await visitor.connect(host="127.0.0.2") for _ in range(40)]
        await asyncio.gather(*map(read_end, crowd[:24]))
        visitor._writers[0].write(b"\r\n{}")
        assert (await asyncio.wait_for(slow.readline(), 60.0)).startswith(b"HTTP/1.1 ")

    serve(script)


def test_who_has_shown_the_key_of_a_session_is_no_stranger() -> None:
    async def script(manager: SessionManager, visitor: Visitor) -> None:
        group = asyncio.create_task(manager.run(GRANT))
        async with visitor.client() as client:
            key = (await client.post("/sessions", json={})).json()["key"]
        said = HEAD.replace(b"/sessions", b"/reward") + f"Authorization: Bearer {key}\r\n\r\n{{}}".encode()
        agent = await visitor.connect(said)
        assert (await agent.readline()).startswith(b"HTTP/1.1 400 "), "no reward, and the key is right"
        crowd = [await visitor.connect() for _ in range(40)]
        await asyncio.gather(*map(read_end, crowd[:24]))
        visitor._writers[0].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"healthy" in await asyncio.wait_for(agent.readuntil(b'"healthy"'), 60.0)
        group.cancel()

    serve(script)


def test_connections_send_small_answers_at_once():
    async def run() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            found.set_result(option)
            writer.close()

        listener = _listen(LOOPBACK, 0)
        serving = await asyncio.start_server(accept, sock=listener)
        async with serving, asyncio.timeout(10.0):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await found

    assert asyncio.run(run())
