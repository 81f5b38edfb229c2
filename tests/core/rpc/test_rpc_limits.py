"""The bounds of a server: sizes, parts, time, and memory as the last one."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import DeadlineExceeded, WireError
from asyncrl.core.rpc import Client, Limits, Request, Server
from asyncrl.core.rpc.memory import MemoryGuard, resident_bytes
from asyncrl.core.rpc.request import MAX_ERROR_CHARACTERS, read_request
from asyncrl.core.rpc.server import MAX_CALLERS, MAX_TURN_OF_CALLER, WINDOW_S, Delays
from asyncrl.core.runtime.interface import Arrival
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.sockets.keys import Role
from asyncrl.core.wire import RPC_VERSION
from asyncrl.core.wire import pack_header as pack
from tests.buffer.hostile.hostile_parts import dealer, raw_part, raw_peer, raw_socket, shake_hands


def header_of(fields: dict[str, Any]) -> bytes:
    return pack(fields, RPC_VERSION)


@contextlib.contextmanager
def flooded(address: str) -> Iterator[tuple[str, int]]:
    """Yield the address and the pid of an echoing server that may grow by 64 MiB."""
    command = [sys.executable, "-m", "tests.core.rpc.flooded_process", address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait(60.0)


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def call_again(client: Client) -> dict[str, int]:
    """Call as honest clients do: what was on its way when the connection went is sent once more."""
    for _ in range(10):
        with contextlib.suppress(DeadlineExceeded):
            return client.call("echo", deadline_s=60.0, n=2).args
    raise AssertionError("ten calls had no answer")


def flood(end: socket.socket, pid: int) -> int:
    """Send parts of one message until the server hangs up; return the most memory that it had."""
    largest, part = 0, raw_part(bytes(1 << 20), has_more=True)
    hang_up = select.poll()
    hang_up.register(end, select.POLLIN)
    for _ in range(1000):
        end.sendall(part)
        largest = max(largest, anonymous_bytes(pid))
        if hang_up.poll(0):
            return largest
    raise AssertionError(f"the server took 1000 MiB and has {largest >> 20} MiB")


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_message_that_never_ends_costs_its_sender_the_connection_and_nobody_the_service(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "echo"
    with flooded("tcp://127.0.0.1:*" if kind == "tcp" else f"ipc://{path}") as (address, pid):
        client = Client(ThreadRuntime(), address)
        assert client.call("echo", n=1).args == {"n": 1}
        before = anonymous_bytes(pid)
        with raw_socket(address) if kind == "tcp" else socket.socket(socket.AF_UNIX) as end:
            if kind == "ipc":
                end.connect(str(path))
            shake_hands(end)
            end.recv(4096)  # the server's half of the handshake
            with contextlib.suppress(OSError):
                assert flood(end, pid) - before < 400 << 20
        assert call_again(client) == {"n": 2}, "an honest client comes back by itself"
        assert anonymous_bytes(pid) - before < 64 << 20
        client.close()


def test_the_guard_counts_from_the_smallest_size_and_again_after_a_reset() -> None:
    sizes = iter([200 << 20, 180 << 20, 212 << 20, (212 << 20) + 1, 213 << 20, 245 << 20])
    guard = MemoryGuard(32 << 20, lambda: next(sizes))
    assert [guard.is_passed() for _ in range(3)] == [False, False, True]
    guard.reset()
    assert not guard.is_passed(), "it has grown by 32 MiB since the reset, and no more"


def test_the_size_of_a_process_holds_what_it_has_written() -> None:
    ballast = bytearray(b"x" * (160 << 20))
    assert resident_bytes() > len(ballast)


@pytest.mark.long
def test_connections_that_say_nothing_are_closed_and_their_descriptors_are_free() -> None:
    with flooded("tcp://127.0.0.1:*") as (address, pid):
        descriptors = Path(f"/proc/{pid}/fd")
        before = len(list(descriptors.iterdir()))
        strangers = [raw_socket(address) for _ in range(200)]
        silent = [raw_peer(address) for _ in range(20)]
        for wait_s, num_left in ((15.0, 20), (45.0, 0)):
            end = time.monotonic() + wait_s
            while (found := len(list(descriptors.iterdir())) - before) > num_left:
                assert time.monotonic() < end, f"{found} connections are left after {wait_s:g} s"
                time.sleep(0.2)
        for one in (*strangers, *silent):
            one.close()


def test_a_peer_of_a_service_that_died_is_told_its_address_and_the_operation() -> None:
    with flooded("tcp://127.0.0.1:*") as (address, _):
        client = Client(ThreadRuntime(), address)
        assert client.call("echo", n=1).args == {"n": 1}
    with pytest.raises(DeadlineExceeded, match=f"'echo' at {address}"):
        client.call("echo", deadline_s=0.2)
    client.close()


def test_replies_for_a_peer_that_never_reads_are_dropped_and_do_not_pile_up() -> None:
    with flooded("tcp://127.0.0.1:*") as (address, pid), raw_peer(address) as end:
        client = Client(ThreadRuntime(), address)
        client.call("echo")
        before = anonymous_bytes(pid)
        request = header_of({"id": 1, "op": "echo", "args": {}})
        message = raw_part(request, has_more=True) + raw_part(bytes(60_000), has_more=False)
        for _ in range(2500):
            end.sendall(message)
        assert client.call("echo", n=1).args == {"n": 1}
        assert anonymous_bytes(pid) - before < 50 << 20
        client.close()


def test_messages_that_wait_for_a_busy_server_are_held_back_at_their_sender() -> None:
    with flooded("tcp://127.0.0.1:*") as (address, pid), raw_peer(address) as end:
        client = Client(ThreadRuntime(), address)
        client.call("echo")
        before = anonymous_bytes(pid)
        end.sendall(raw_part(header_of({"id": 1, "op": "stall", "args": {}}), has_more=False))
        request = header_of({"id": 1, "op": "echo", "args": {}})
        message = raw_part(request, has_more=True) + raw_part(bytes(1 << 19), has_more=False)
        end.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            for _ in range(400):
                end.sendall(message)
        assert anonymous_bytes(pid) - before < 40 << 20
        assert client.call("echo", n=1).args == {"n": 1}
        client.close()


def test_what_a_request_lay_is_told_without_comparing_clocks() -> None:
    delays, ahead_s = Delays(), 12_345.0  # of the caller's clock before ours
    assert delays.measure_s(b"a", ahead_s + 10.0, 10.1) == 0.0, "the first one is taken for the quickest"
    assert delays.measure_s(b"a", ahead_s + 20.0, 27.1) == pytest.approx(7.0)
    assert delays.measure_s(b"a", ahead_s + 26.0, 27.1) == pytest.approx(1.0)
    assert delays.measure_s(b"a", ahead_s + 30.0, 30.0) == 0.0
    assert delays.measure_s(b"a", ahead_s + 40.0, 40.1) == pytest.approx(0.1)
    assert delays.measure_s(b"b", 20.0, 27.1) == 0.0, "another connection has a clock of its own"


def test_a_long_outage_does_not_make_what_lay_through_it_the_quickest() -> None:
    delays = Delays()
    delays.measure_s(b"a", 0.0, 0.1)
    away_s = 3 * WINDOW_S
    assert delays.measure_s(b"a", 1.0, 1.1 + away_s) == pytest.approx(away_s)
    assert delays.measure_s(b"a", 6.0, 1.2 + away_s) == pytest.approx(away_s - 4.9)


def test_clocks_that_drift_apart_make_no_request_look_old() -> None:
    delays, drift = Delays(), 1e-4
    largest = max(delays.measure_s(b"a", now_s * (1.0 - drift), float(now_s)) for now_s in range(36_000))
    assert largest <= 2.1 * WINDOW_S * drift


def test_callers_without_end_take_bounded_memory() -> None:
    delays = Delays()
    for number in range(2 * MAX_CALLERS):
        delays.measure_s(number.to_bytes(4), 0.0, 1.0)
    assert len(delays._callers) == MAX_CALLERS
    assert delays.measure_s((0).to_bytes(4), 0.0, 5.0) == 0.0, "a forgotten one begins anew"


@pytest.mark.parametrize(
    "times", [{"sent_s": float("nan"), "within_s": 1.0}, {"sent_s": 1.0}, {"sent_s": "x"}]
)
def test_a_request_that_was_sent_at_no_time_is_malformed(times: dict[str, object]) -> None:
    header = header_of({"id": 1, "op": "echo", "args": {}, **times})
    arrival = Arrival(b"client", [header], False, Role.SERVICE, lambda parts: None)
    with pytest.raises(WireError):
        read_request(arrival)


def test_a_message_without_parts_is_no_request() -> None:
    with pytest.raises(WireError, match="without a header"):
        read_request(Arrival(b"client", [], False, Role.SERVICE, lambda parts: None))


class Keeps:
    """Grows by 8 MiB with each message."""

    def __init__(self) -> None:
        self.kept: list[bytearray] = []
        self.num_handled = 0

    def handle(self, request: Request) -> None:
        self.num_handled += 1
        self.kept.append(bytearray(b"x" * (8 << 20)))
        request.reply()

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None: ...


def test_a_turn_whose_answers_are_large_ends_early_and_is_followed_by_the_guard_of_memory() -> None:
    server, handler, stop = (
        Server(ThreadRuntime(), limits=Limits(memory_bytes=12 << 20)),
        Keeps(),
        ThreadEvent(),
    )
    turns: list[int] = []

    def end_turn() -> None:
        turns.append(handler.num_handled - sum(turns))

    with dealer(server.address) as end:
        for _ in range(10):
            end.send(header_of({"id": 1, "op": "keep", "args": {}}))
        given = {"end_turn": end_turn, "is_full": lambda: handler.num_handled > sum(turns)}
        thread = threading.Thread(target=server.serve, args=(handler, stop), kwargs=given, daemon=True)
        thread.start()
        end_s = time.monotonic() + 60.0
        while not server.counters["reopened"]:
            assert time.monotonic() < end_s, "nobody has looked at the memory"
            time.sleep(0.01)
        stop.set()
        thread.join(60.0)
    assert not thread.is_alive() and max(turns) == 1


class Notes:
    """Answers nothing, and writes down who asked, turn by turn."""

    def __init__(self) -> None:
        self.turns: list[list[str]] = [[]]

    def handle(self, request: Request) -> None:
        self.turns[-1].append(request.args["name"])

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None: ...


def test_a_caller_who_asks_without_end_has_a_bounded_part_of_each_turn() -> None:
    """Others wait for the end of a turn, so it ends soon."""
    server, handler, stop = Server(ThreadRuntime()), Notes(), ThreadEvent()
    with dealer(server.address) as flooding, dealer(server.address) as other:
        for _ in range(100):
            flooding.send(header_of({"id": 1, "op": "note", "args": {"name": "flooding"}}))
        for _ in range(3):
            other.send(header_of({"id": 1, "op": "note", "args": {"name": "other"}}))
        given = {"end_turn": lambda: handler.turns.append([])}
        thread = threading.Thread(target=server.serve, args=(handler, stop), kwargs=given, daemon=True)
        thread.start()
        end_s = time.monotonic() + 60.0
        while sum(map(len, handler.turns)) < 103:
            assert time.monotonic() < end_s, "not all were handled"
            time.sleep(0.01)
        stop.set()
        thread.join(60.0)
    counts = [turn.count("flooding") for turn in handler.turns]
    assert not thread.is_alive() and max(counts) == MAX_TURN_OF_CALLER
    assert sum(turn.count("other") for turn in handler.turns) == 3


class Repeats:
    """Refuses everything, at full length."""

    def handle(self, request: Request) -> None:
        raise WireError(str(request.args["text"]), hint=str(request.args["text"]))

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None: ...


def test_an_error_does_not_bring_back_what_its_request_held() -> None:
    server, stop = Server(ThreadRuntime()), ThreadEvent()
    thread = threading.Thread(target=server.serve, args=(Repeats(), stop), daemon=True)
    thread.start()
    client = Client(ThreadRuntime(), server.address)
    with pytest.raises(WireError) as caught:
        client.call("repeat", deadline_s=30.0, text="x" * 200_000)
    assert len(caught.value.message) == len(caught.value.hint) == MAX_ERROR_CHARACTERS
    client.close()
    stop.set()
    thread.join(60.0)
