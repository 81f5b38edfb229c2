"""Request and reply over real sockets."""

import asyncio
import gc
import math
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from asyncrl.core.errors import AsyncrlError, ConnectionLost, DeadlineExceeded, FencedError, RemoteError
from asyncrl.core.rpc import AsyncClient, Client, Request, Server
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.wire import RPC_VERSION, pack_header, unpack_map

LONG_S = 60.0
"""A call that waited until its deadline would be seen."""


class Echo:
    """Answers `echo`, fails `fence`, `break` and `tire`, parks `park` until the turn of a `release` ends."""

    def __init__(self) -> None:
        self.parked: list[Request] = []
        self.is_released = False

    def handle(self, request: Request) -> None:
        if request.op == "fence":
            raise FencedError("token 1 is older than 2", hint="Open again")
        if request.op == "break":
            raise ZeroDivisionError("a bug")
        if request.op == "tire":
            raise DeadlineExceeded("its own call had no answer")
        if request.op == "park":
            self.parked.append(request)
            return
        if request.op == "release":
            self.is_released = True
        if request.op == "count":
            request.reply(num_parked=len(self.parked))
            return
        request.reply(request.frames, **request.args)

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None: ...

    def let_go(self) -> None:
        while self.is_released and self.parked:
            self.parked.pop().reply(late=True)


@contextmanager
def serving(bind: str = "tcp://127.0.0.1:*") -> Iterator[Server]:
    server, stop = Server(ThreadRuntime(), bind), ThreadEvent()
    thread = threading.Thread(target=server.serve, args=(echo := Echo(), stop, echo.let_go))
    thread.start()
    yield server
    stop.set()
    thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    client = Client(ThreadRuntime(), server.address)
    yield client
    client.close()


def test_a_call_returns_arguments_and_frames(client: Client) -> None:
    reply = client.call("echo", [b"abc", b""], n=1, names=["a"])
    assert reply.args == {"n": 1, "names": ["a"]}
    assert reply.frames == [b"abc", b""]


def test_a_service_error_keeps_its_class_and_hint(client: Client) -> None:
    with pytest.raises(FencedError, match="older") as caught:
        client.call("fence")
    assert caught.value.hint == "Open again"


def test_a_bug_in_a_handler_fails_the_call_and_not_the_service(client: Client, server: Server) -> None:
    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        client.call("break")
    assert client.call("echo", n=2).args == {"n": 2}
    assert server.counters["internal_errors"] == 1


def test_a_call_without_an_answer_ends_at_its_deadline_and_the_next_one_works(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.call("park", deadline_s=0.05)
    other = Client(ThreadRuntime(), client.address)
    other.call("release")
    while other.call("count").args["num_parked"]:
        pass  # until the late answer is on its way
    other.close()
    assert client.call("echo", n=3).args == {"n": 3}


def test_a_call_that_waits_for_another_threads_call_ends_at_its_own_deadline(
    client: Client, server: Server
) -> None:
    thread = threading.Thread(target=lambda: client.call("park", deadline_s=LONG_S))
    thread.start()
    with closing(Client(ThreadRuntime(), server.address)) as other:
        wait_until_parked(other, 1)
        with pytest.raises(DeadlineExceeded):
            client.call("echo", deadline_s=0.05)
        assert thread.is_alive()
        other.call("release")
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_client_that_is_never_closed_does_not_hold_up_the_collector(server: Server) -> None:
    client = Client(ThreadRuntime(), server.address)
    client.call("echo")
    del client
    gc.collect()


def test_a_call_to_nobody_ends_at_its_deadline() -> None:
    client = Client(ThreadRuntime(), "tcp://127.0.0.1:1")
    with pytest.raises(DeadlineExceeded):
        client.call("echo", deadline_s=0.05)
    client.close()


def test_a_parked_request_is_answered_later(server: Server) -> None:
    async def scenario() -> bool:
        client = AsyncClient(ThreadRuntime(), server.address)
        parked = asyncio.create_task(client.call("park"))
        await client.call("echo")
        await client.call("release")
        reply = await parked
        client.close()
        return bool(reply.args["late"])

    assert asyncio.run(scenario())


def test_a_call_that_finds_the_connection_first_wakes_those_that_wait_for_it(server: Server) -> None:
    async def scenario() -> bool:
        client = AsyncClient(ThreadRuntime(), server.address)
        waiting = asyncio.create_task(client.call("echo"))
        await asyncio.sleep(0)  # it has tried, and found no connection
        assert client._line.wait(LONG_S), "the connection is up, and the loop has not heard of it"
        parked = asyncio.create_task(client.call("park", deadline_s=LONG_S))
        await waiting  # no answer comes that would wake it
        await client.call("release")
        reply = await parked
        client.close()
        return bool(reply.args["late"])

    assert asyncio.run(scenario())


class Gathering:
    """Answers only at the end of a turn."""

    def __init__(self) -> None:
        self.taken: list[Request] = []

    def handle(self, request: Request) -> None:
        self.taken.append(request)

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None:
        return

    def end_turn(self) -> None:
        taken, self.taken = self.taken, []
        for request in taken:
            request.reply(num_together=len(taken))


def test_a_turn_ends_as_soon_as_nothing_more_has_come_and_a_server_ends_at_once() -> None:
    server, stop, handler = Server(ThreadRuntime()), ThreadEvent(), Gathering()
    thread = threading.Thread(target=server.serve, args=(handler, stop, handler.end_turn))
    thread.start()
    with closing(Client(ThreadRuntime(), server.address)) as client:
        try:
            calls = [client.call("x", deadline_s=LONG_S).args["num_together"] for _ in range(20)]
            assert calls == [1] * 20
        finally:
            stop.set()
            thread.join(LONG_S)
            assert not thread.is_alive()


def test_many_calls_of_one_async_client_are_in_flight_at_once(server: Server) -> None:
    async def scenario() -> list[int]:
        client = AsyncClient(ThreadRuntime(), server.address)
        replies = await asyncio.gather(*(client.call("echo", n=n) for n in range(50)))
        client.close()
        return [reply.args["n"] for reply in replies]

    assert asyncio.run(scenario()) == list(range(50))


def test_a_deadline_that_the_service_missed_is_not_taken_for_the_callers_own(server: Server) -> None:
    async def scenario() -> None:
        with closing(AsyncClient(ThreadRuntime(), server.address)) as client:
            await client.call("tire", deadline_s=LONG_S)

    with pytest.raises(DeadlineExceeded, match="its own call had no answer"):
        asyncio.run(scenario())


@contextmanager
def strange_service(folder: Path, **options: int) -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    """Yield an address, and the socket that listens there and does nothing by itself."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.bind(f"ipc://{folder}/strange")
        yield f"ipc://{folder}/strange", socket


def test_a_malformed_reply_is_counted_and_ends_no_client(tmp_path: Path) -> None:
    async def scenario(address: str, socket: zmq.Socket[bytes]) -> None:
        with closing(AsyncClient(ThreadRuntime(), address)) as client:
            call = asyncio.create_task(client.call("echo", deadline_s=LONG_S))
            caller = (await asyncio.to_thread(socket.recv_multipart))[0]
            socket.send_multipart([caller, b"\xc1"])
            while not client.counters["malformed"]:
                await asyncio.sleep(0.01)
            assert not call.done()
            call.cancel()

    with strange_service(tmp_path, RCVTIMEO=60_000, LINGER=0) as (address, socket):
        asyncio.run(asyncio.wait_for(scenario(address, socket), LONG_S))


def test_a_service_that_reads_nothing_is_said_to_be_unreachable_when_it_has_no_more_room(
    tmp_path: Path,
) -> None:
    def fill(client: Client) -> None:
        for _ in range(3000):
            client.begin("echo", [bytes(1 << 20)], deadline_s=0.5)

    with strange_service(tmp_path, RCVHWM=1, LINGER=0) as (address, _):
        with closing(Client(ThreadRuntime(), address)) as client:
            with pytest.raises(DeadlineExceeded, match="strange"):
                fill(client)


def test_malformed_messages_are_counted_and_do_not_end_the_service(client: Client, server: Server) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(server.address)
    for message in ([b""], [b"\xc1"], [pickle.dumps({"op": "echo"})], [b"x" * 100_000]):
        socket.send_multipart(message)
    end = time.monotonic() + LONG_S
    while server.counters["malformed"] < 4:
        assert time.monotonic() < end, server.counters
        assert client.call("echo", n=1).args == {"n": 1}
    socket.close()
    context.term()
    assert server.counters["malformed"] == 4


def test_an_address_that_is_taken_is_refused_by_name(server: Server) -> None:
    with pytest.raises(AsyncrlError, match="cannot listen on"):
        Server(ThreadRuntime(), server.address)


def wait_until_parked(client: Client, count: int) -> None:
    while client.call("count").args["num_parked"] < count:
        pass


def test_a_call_whose_server_ends_is_over_at_once_and_the_next_one_reaches_the_successor(
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path}/server"
    with closing(Client(ThreadRuntime(), address)) as client:
        with serving(address):
            lost = client.begin("park", deadline_s=LONG_S)
            wait_until_parked(client, 1)
        with pytest.raises(ConnectionLost, match="'park'"):
            lost.end()
        with serving(address):
            assert client.call("echo", number=2).args == {"number": 2}


def test_a_successor_that_listens_before_the_break_is_noticed_is_reached(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/server"
    with closing(Client(ThreadRuntime(), address)) as client:
        for number in range(12):
            with serving(address):
                reply = None
                while reply is None:
                    with suppress(ConnectionLost):  # it was sent before the break was noticed
                        reply = client.call("echo", deadline_s=LONG_S, number=number)
                assert reply.args == {"number": number}


def test_an_answer_that_came_before_the_connection_broke_is_kept(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/server"
    with closing(Client(ThreadRuntime(), address)) as client:
        with serving(address) as server:
            answered = client.begin("echo", number=1)
            while not server.counters["requests"]:
                pass
        with pytest.raises(DeadlineExceeded):
            client.call("echo", deadline_s=0.2)
        assert answered.end().args == {"number": 1}


def test_awaited_calls_whose_server_ends_are_over_at_once_and_the_next_one_reaches_the_successor(
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path}/server"

    async def call() -> None:
        client = AsyncClient(ThreadRuntime(), address)
        for _ in range(2):
            with serving(address):
                lost = [asyncio.create_task(client.call("park", deadline_s=LONG_S)) for _ in range(3)]
                while (await client.call("count")).args["num_parked"] < 3:
                    pass
            results = await asyncio.gather(*lost, return_exceptions=True)
            assert [type(one) for one in results] == 3 * [ConnectionLost]
        client.close()

    asyncio.run(call())


def test_a_client_may_be_closed_twice(server: Server) -> None:
    for client in (Client(ThreadRuntime(), server.address), AsyncClient(ThreadRuntime(), server.address)):
        client.close()
        client.close()


def test_a_caller_of_an_older_version_is_told_so_in_its_own(server: Server) -> None:
    with closing(zmq.Context.instance().socket(zmq.DEALER)) as end:
        end.setsockopt(zmq.RCVTIMEO, 20_000)
        end.setsockopt(zmq.LINGER, 0)
        end.connect(server.address)
        end.send(pack_header({"id": 7, "op": "echo", "args": {}}, RPC_VERSION - 1))
        answer = unpack_map(end.recv(), "header", 4096)
    older = RPC_VERSION - 1
    assert (answer["v"], answer["id"], answer["ok"], answer["kind"]) == (older, 7, False, "WireError")
    said = f"schema version {older}, this process speaks {RPC_VERSION}"
    assert said in answer["message"] and "same asyncrl" in answer["hint"]
    assert server.counters["malformed"] == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_a_wait_for_either_of_two_calls_ends_with_the_one_that_is_answered(is_first: bool) -> None:
    with serving() as one, serving() as other:
        clients = [Client(ThreadRuntime(), server.address) for server in (one, other)]
        mine, beside = (client.begin("park", deadline_s=LONG_S) for client in clients)
        answered, waiting = (mine, beside) if is_first else (beside, mine)
        releasing = Client(ThreadRuntime(), answered.client.address)
        while not releasing.call("count").args["num_parked"]:
            pass  # until the call that is to be answered is there
        thread = threading.Thread(target=releasing.call, args=("release",))
        thread.start()
        mine.client.await_either(mine, beside)
        assert answered.is_over() and not waiting.is_over()
        assert answered.end().args == {"late": True}
        thread.join(LONG_S)
        for client in (*clients, releasing):
            client.close()


def test_a_wait_for_either_of_two_calls_ends_with_the_deadline_of_the_earlier() -> None:
    with serving() as one, serving() as other:
        clients = [Client(ThreadRuntime(), server.address) for server in (one, other)]
        mine, beside = clients[0].begin("park", deadline_s=LONG_S), clients[1].begin("park", deadline_s=0.05)
        clients[0].await_either(mine, beside)
        assert beside.is_over() and not mine.is_over()
        with pytest.raises(DeadlineExceeded, match="no answer within"):
            beside.end()
        for client in clients:
            client.close()


def test_a_wait_for_two_calls_of_one_client_is_refused() -> None:
    with serving() as one:
        client = Client(ThreadRuntime(), one.address)
        mine, beside = (client.begin("park", deadline_s=LONG_S) for _ in range(2))
        with pytest.raises(AssertionError, match="one by one"):
            client.await_either(mine, beside)
        client.close()


def test_a_wait_for_either_of_two_calls_ends_although_another_thread_holds_a_client() -> None:
    with serving() as one, serving() as other:
        clients = [Client(ThreadRuntime(), server.address) for server in (one, other)]
        mine, beside = clients[0].begin("park", deadline_s=LONG_S), clients[1].begin("park", deadline_s=0.05)
        with clients[1]._lock:
            clients[0].await_either(mine, beside)
            assert beside.is_over()
        assert not mine.is_over()
        for client in clients:
            client.close()


def test_a_wait_for_either_of_two_calls_ends_when_a_connection_breaks() -> None:
    with serving() as one, ExitStack() as stack:
        clients = [Client(ThreadRuntime(), one.address)]
        clients.append(Client(ThreadRuntime(), stack.enter_context(serving()).address))
        mine, beside = (client.begin("park", deadline_s=LONG_S) for client in clients)
        thread = threading.Thread(target=stack.close)
        thread.start()
        clients[0].await_either(mine, beside)
        assert beside.is_over() and not mine.is_over()
        with pytest.raises(ConnectionLost):
            beside.end()
        thread.join(LONG_S)
        for client in clients:
            client.close()
