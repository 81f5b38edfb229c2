"""Parts of messages without copies, and calls of which several are under way."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import zmq

from asyncrl.core.errors import DeadlineExceeded, WireError
from asyncrl.core.rpc import Client, Request, Server
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.sockets.frames import LONG_BYTES, _as_received, receive_parts, send_parts


class Echo:
    """Answers with what it got; `hold` keeps a request until the next `free`."""

    def __init__(self) -> None:
        self.held: list[Request] = []

    def handle(self, request: Request) -> None:
        if request.op == "hold":
            self.held.append(request)
            return
        if request.op == "refuse":
            raise WireError("refused")
        for held in self.held:
            held.reply(held.frames, **held.args)
        self.held.clear()
        request.reply(request.frames, **request.args)

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    server, stop = Server(ThreadRuntime()), ThreadEvent()
    thread = threading.Thread(target=server.serve, args=(Echo(), stop), daemon=True)
    thread.start()
    found = Client(ThreadRuntime(), server.address)
    yield found
    found.close()
    stop.set()
    thread.join(120.0)


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context.instance()
    with context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        port = left.bind_to_random_port("tcp://127.0.0.1")
        right.connect(f"tcp://127.0.0.1:{port}")
        for socket in (left, right):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
        yield left, right


def test_parts_of_every_length_come_back_as_they_were_sent(client: Client) -> None:
    parts = [
        bytes([number]) * length for number, length in enumerate((0, 1, LONG_BYTES - 1, LONG_BYTES, 1 << 20))
    ]
    reply = client.call("echo", parts, n=1)
    assert [bytes(part) for part in reply.frames] == parts


def test_a_long_part_is_sent_on_as_the_message_that_it_came_in(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    left, right = pair
    send_parts(left, [b"a" * LONG_BYTES, b"short"])
    long, short = receive_parts(right)
    assert isinstance(long, memoryview)
    assert isinstance(long.obj, zmq.Frame)
    assert isinstance(short, bytes), "ZMQ would keep its whole input buffer for it"
    assert _as_received(long) is long.obj
    assert _as_received(long[1:]) is not long.obj, "not all of it"
    send_parts(right, [long, long[1:]])
    whole, tail = receive_parts(left)
    assert (bytes(whole), bytes(tail)) == (bytes(long), b"a" * (LONG_BYTES - 1))


def test_calls_that_were_begun_end_in_any_order(client: Client) -> None:
    held, quick = client.begin("hold", n=1), client.begin("echo", n=2)
    assert quick.end().args == {"n": 2}
    assert held.end().args == {"n": 1}


def test_the_error_of_a_begun_call_is_raised_where_it_ends(client: Client) -> None:
    refused, fine = client.begin("refuse"), client.begin("echo", n=1)
    assert fine.end().args == {"n": 1}
    with pytest.raises(WireError, match="refused"):
        refused.end()


def test_the_reply_of_a_forgotten_call_is_dropped(client: Client) -> None:
    client.forget(client.begin("echo", n=1))
    assert client.call("echo", n=2).args == {"n": 2}
    assert not client._begun


def test_a_reply_that_has_come_is_taken_even_after_the_deadline(client: Client) -> None:
    early, late = client.begin("echo", deadline_s=0.05, n=1), client.begin("hold", deadline_s=0.05, n=2)
    with pytest.raises(WireError):
        client.call("refuse")  # answered behind the first, and frees nothing that is held
    ThreadEvent().wait(0.06)
    assert early.end().args == {"n": 1}
    with pytest.raises(DeadlineExceeded, match="hold"):
        late.end()
