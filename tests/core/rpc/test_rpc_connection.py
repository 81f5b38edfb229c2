"""A connection that breaks in the middle of a long answer, and requests that outlive their connection."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from asyncrl.core.errors import ConnectionLost, DeadlineExceeded
from asyncrl.core.rpc import AsyncClient, Client
from asyncrl.core.runtime.threads import ThreadRuntime

NUM_PARTS = 250
"""libzmq takes in what happened to a connection at every 100th part that is received."""

BREAK_WITHIN_AN_ANSWER = f"""
import sys, time, zmq
from asyncrl.core.sockets.line import ZmqLine

router = zmq.Context().socket(zmq.ROUTER)
router.setsockopt(zmq.LINGER, 0)
router.bind(sys.argv[1])
line = ZmqLine(sys.argv[1], None)
line.socket.send(b"question")
peer, _ = router.recv_multipart()
router.send_multipart([peer, *{NUM_PARTS} * [b"part"]])
parts = [line.socket.recv()]
router.close()
while not line.is_broken:
    assert line.reports.poll(10_000)
    line.look()
time.sleep(0.5)  # until libzmq would have told the socket as well
while line.socket.getsockopt(zmq.RCVMORE):
    parts.append(line.socket.recv())
assert len(parts) == {NUM_PARTS}
"""


def test_a_connection_that_breaks_while_an_answer_is_read_does_not_end_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BREAK_WITHIN_AN_ANSWER, f"ipc://{tmp_path}/server"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def first_word(router: zmq.Socket[bytes]) -> bytes:
    assert router.poll(10_000), "the server hears nothing"
    return router.recv_multipart()[1]


def test_nothing_is_sent_before_there_is_a_connection(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/server"
    with (
        closing(Client(ThreadRuntime(), address)) as client,
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
    ):
        with pytest.raises(DeadlineExceeded, match="was not sent"):
            client.call("early", deadline_s=0.2)
        router.bind(address)
        client.begin("later", deadline_s=10.0)
        assert b"later" in first_word(router)


def test_nothing_that_is_awaited_is_sent_before_there_is_a_connection(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/server"

    async def call_nobody() -> None:
        with (
            closing(AsyncClient(ThreadRuntime(), address)) as client,
            pytest.raises(DeadlineExceeded, match="was not sent"),
        ):
            await client.call("early", deadline_s=0.2)

    asyncio.run(call_nobody())


def test_what_lay_unsent_when_its_connection_broke_does_not_reach_the_next_server(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/server"
    with closing(Client(ThreadRuntime(), address)) as client, zmq.Context() as context:
        with context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.RCVHWM, 1)
            router.bind(address)
            begun = [client.begin("first", [bytes(1 << 20)]) for _ in range(20)]
            first_word(router)
        for call in begun:
            with pytest.raises(ConnectionLost):
                call.end()
        with context.socket(zmq.ROUTER) as successor:
            successor.bind(address)
            client.begin("later", deadline_s=10.0)
            assert b"later" in first_word(successor)
