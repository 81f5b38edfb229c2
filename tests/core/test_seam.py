"""The runtime seam: events that wake servers, and servers that sleep until something is due."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.rpc import Client, Request, Server, memory
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from tests.runtimes import CountingRuntime
from tests.setup.suite.core_alone import needs_all

LONG_S = 30.0


class Sleeper:
    """Wants to be woken at `due_at`, once; notes when it was, and on which thread it was called."""

    def __init__(self) -> None:
        self.due_at = math.inf
        self.ticks: list[float] = []
        self.threads: set[int] = set()

    def handle(self, request: Request) -> None:
        request.reply(**request.args)

    def wake_at(self) -> float:
        return self.due_at

    def tick(self, now: float) -> None:
        self.ticks.append(now)
        self.due_at = math.inf

    def note_thread(self) -> None:
        self.threads.add(threading.get_ident())


@contextmanager
def serving(handler: Sleeper, runtime: ThreadRuntime) -> Iterator[Server]:
    server, stop = Server(runtime), ThreadEvent()
    thread = threading.Thread(target=server.serve, args=(handler, stop))
    thread.start()
    yield server
    stop.set()
    thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.fixture
def rare_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look at their memory when they start, and not again: they wake for nothing of their own."""
    monkeypatch.setattr(memory, "SHORTEST_PAUSE_S", 1e4)
    monkeypatch.setattr(memory, "LONGEST_PAUSE_S", 1e4)


def wait_until_asleep(server: Server) -> None:
    """Wait until a server has looked at its memory, and waits for what comes."""
    end = time.monotonic() + LONG_S
    while server._guard_at - time.monotonic() < LONG_S:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.usefixtures("rare_guard")
def test_a_call_from_another_thread_is_made_at_once_in_order_on_the_server_s_thread() -> None:
    handler, made, done = Sleeper(), list[int](), threading.Event()
    with serving(handler, ThreadRuntime()) as server:
        wait_until_asleep(server)
        for number in range(100):
            server.call_soon(lambda number=number: made.append(number))
        server.call_soon(handler.note_thread)
        server.call_soon(done.set)
        assert done.wait(LONG_S), "nobody has woken the server"
        assert made == list(range(100))
        assert handler.threads and threading.get_ident() not in handler.threads


@pytest.mark.usefixtures("rare_guard")
def test_a_server_whose_stop_is_set_ends_at_once_although_nothing_is_due() -> None:
    server, stop = Server(ThreadRuntime()), ThreadEvent()
    thread = threading.Thread(target=server.serve, args=(Sleeper(), stop))
    thread.start()
    wait_until_asleep(server)
    stop.set()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_a_call_to_a_server_that_has_ended_is_dropped() -> None:
    server, stop = Server(ThreadRuntime()), ThreadEvent()
    stop.set()
    server.serve(Sleeper(), stop)
    server.call_soon(lambda: pytest.fail("nobody serves"))


def test_a_server_calls_its_handler_when_that_is_due_and_not_before() -> None:
    handler, runtime = Sleeper(), CountingRuntime()
    handler.due_at = due_at = runtime.now() + 0.2503
    end = due_at + LONG_S
    with serving(handler, runtime):
        while not handler.ticks and time.monotonic() < end:
            time.sleep(0.01)
    (ticked,) = handler.ticks
    assert ticked >= due_at


def test_an_idle_server_wakes_for_the_guard_of_memory_alone_and_never_spins() -> None:
    """Its guard looks at 0.05, 0.15, 0.35, 0.75 s and then once a second."""
    runtime = CountingRuntime()
    began = time.monotonic()
    with serving(Sleeper(), runtime), runtime.counting() as counted:
        time.sleep(2.0)
    assert counted.total() <= 6 + (time.monotonic() - began) / memory.LONGEST_PAUSE_S


@pytest.mark.usefixtures("rare_guard")
def test_a_wait_that_ends_between_two_milliseconds_is_not_spun_through() -> None:
    """libzmq waits whole milliseconds: a wait that was rounded down ended too early, again and again."""
    handler, runtime = Sleeper(), CountingRuntime()
    with serving(handler, runtime) as server, closing(Client(runtime, server.address)) as client:
        for _ in range(20):
            handler.due_at = runtime.now() + 0.0117
            client.call("wakes it")
            before = runtime.num_wakes
            time.sleep(0.03)
            assert runtime.num_wakes - before <= 3, "once for what is due, and what else there is"


def test_what_waits_for_an_event_can_be_called_when_it_is_set_or_was_before() -> None:
    event, calls = ThreadEvent(), list[str]()
    event.on_set(lambda: calls.append("before"))
    assert not calls
    event.set()
    event.on_set(lambda: calls.append("after"))
    event.set()
    assert calls == ["before", "after"] and event.wait(0.0)


def test_a_call_that_nobody_answers_costs_one_wake_and_not_one_per_millisecond() -> None:
    runtime = CountingRuntime()
    with closing(Client(runtime, "tcp://127.0.0.1:1")) as client, runtime.counting() as counted:
        with pytest.raises(DeadlineExceeded):
            client.call("echo", deadline_s=0.5)
    assert counted.total() <= 3


@pytest.mark.parametrize(
    ("is_there", "module"),
    [
        pytest.param(True, "uvloop", marks=needs_all, id="vllm_s_server"),
        pytest.param(False, "asyncio.unix_events", id="python_without_vllm"),
    ],
)
def test_the_event_loop_of_a_replica_is_that_of(
    is_there: bool, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    if not is_there:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    assert ThreadRuntime().run_async(main()) == module
