"""A coordinator dies between any two things that its peers do, and its successor brings the version at once.

Nothing may be left to a deadline there: what the dead one had ordered and heard is lost with it, and each
peer's hello to the next one makes good for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import AsyncrlError, WireError
from asyncrl.core.rpc import Client, Request, Server
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.runtimes import ManualRuntime
from tests.threads import in_thread
from tests.weight_sync.protocol.test_protocol_machine import EVERYONE, ProtocolMachine
from tests.weight_sync.protocol.world import TIMING, receiver_hello
from tests.weight_sync.sides import ModelReceiver, Peer, manifest_of
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.coordinator_session import MAX_TRIES, CoordinatorSession, Introduction, _Report
from weight_sync.memory import segments
from weight_sync.protocol.messages import Attended
from weight_sync.protocol.protocol import PUBLISHER, Coordination

WAIT_S = 60.0
FLAGS = {"attended": True, "pinned": False, "draining": False}
ORDERS = {"publisher first": (PUBLISHER, "a", "b", "c"), "publisher last": ("a", "b", "c", PUBLISHER)}
AT_ONCE_S = 1.5
assert AT_ONCE_S < TIMING.offer_s < TIMING.deadline_s, "so that who waits for a deadline is found out"


# --- every window, both sides as models -----------------------------------------------------------


def work_until_death(machine: ProtocolMachine, num_things: int) -> bool:
    """Let the peers do so many things on the way of version 2; False if they have nothing more to do."""
    machine.publish()
    while num_things:
        num_before = num_things
        for name in EVERYONE:
            peer = next(peer for peer in machine.peers if peer.name == name)
            if num_things and machine.do_one(peer):
                num_things -= 1
            machine.collect()
        if num_things == num_before:
            return False
    return True


def say_hello(machine: ProtocolMachine, peer: Peer, times: int) -> None:
    """As a peer does by either of its threads, or by both, the second one in the middle of a round.

    What it had begun to receive ends by itself.
    """
    for turn in range(times):
        for name in 3 * turn * EVERYONE:
            machine.work_on(name)
        peer.say_hello(machine.boss, machine.now)
        machine.collect()
    if isinstance(peer, ModelReceiver):
        for thread in [thread for thread in peer.threads.values() if thread.round not in peer.incoming]:
            peer.end(thread, "transport")


def play(num_things: int, order: tuple[str, ...], times: int, is_prompt: bool) -> bool:
    """Return False if the version was everywhere before the coordinator could die."""
    machine = ProtocolMachine()
    try:
        machine.begin_with_a_version_that_all_serve()
        if not work_until_death(machine, num_things):
            return False
        machine.start_coordinator(keep=False)
        for name in order:
            say_hello(machine, next(peer for peer in machine.peers if peer.name == name), times)
            if is_prompt:
                machine.be_prompt(EVERYONE)
        machine.let_pass(AT_ONCE_S, EVERYONE)
        assert {name: one.serving for name, one in machine.receivers.items()} == dict.fromkeys("abc", 2)
        assert not machine.boss.coordination.rounds and not machine.boss.coordination.culprit
        return True
    finally:
        for receiver in machine.receivers.values():
            receiver.staging.close()
        segments.unlink_all(machine.prefix)


@pytest.mark.parametrize("is_prompt", [True, False], ids=["at work meanwhile", "all hellos at once"])
@pytest.mark.parametrize("times", [1, 2], ids=["one hello", "hellos of both threads"])
@pytest.mark.parametrize("order", ORDERS)
def test_wherever_a_coordinator_dies_its_successor_waits_for_no_deadline(
    order: str, times: int, is_prompt: bool
) -> None:
    num_things = 0
    while play(num_things, ORDERS[order], times, is_prompt):
        num_things += 1
    assert num_things > 30, "from the publish to the last load"


# --- the coordinator itself, over real sockets ------------------------------------------------------


class Caller:
    """Speaks as a peer does: polls over one connection, says hello and reports over another."""

    def __init__(self, address: str, name: str, info: dict[str, Any], frames: tuple[bytes, ...] = ()) -> None:
        self._address, self._info, self._frames, self._token = address, info, frames, 0
        self._who = {"name": name, "incarnation": f"{name}#1"}
        self._polls, self._reports = Client(ThreadRuntime(), address), Client(ThreadRuntime(), address)

    def connect_anew(self) -> None:
        self.close()
        self._polls, self._reports = (
            Client(ThreadRuntime(), self._address),
            Client(ThreadRuntime(), self._address),
        )

    def say_hello(self) -> None:
        args = {**self._who, **self._info, "started_ms": 1, "token": self._token}
        operation = "publisher_hello" if self._who["name"] == PUBLISHER else "hello"
        self._token = self._reports.call(operation, self._frames, WAIT_S, **args).args["token"]

    def report(self, event: str, **fields: Any) -> None:
        args = {**self._who, "token": self._token, "event": event, "fields": fields}
        assert self._reports.call("report", (), WAIT_S, **args).args["known"]

    def poll(self, after: int) -> list[dict[str, Any]]:
        """Return the orders that are in the answer, which comes at once if there are any."""
        args = {**self._who, "token": self._token, "after": after}
        return list(self._polls.call("next_order", (), WAIT_S, **args).args["orders"])

    def close(self) -> None:
        self._polls.close()
        self._reports.close()


@contextmanager
def coordinator(token: int, address: str) -> Iterator[None]:
    """Time stands still in it: whatever waits for a deadline waits for ever."""
    service = CoordinatorService(Coordination(TIMING, token=token), ManualRuntime(100.0), address)
    with in_thread(service.run):
        yield


@contextmanager
def two_peers(address: str) -> Iterator[tuple[Caller, Caller]]:
    """A publisher that has version 1, and a receiver whose replica asks for weights."""
    endpoint = {"store_host": "127.0.0.1", "store_port": 1}
    publisher = Caller(address, PUBLISHER, endpoint, (manifest_of(1).to_bytes(),))
    receiver = Caller(address, "receiver.0", {**FLAGS, "serving": 0, "staged": 0})
    try:
        yield publisher, receiver
    finally:
        publisher.close()
        receiver.close()


def take(caller: Caller, kind: str, after: int) -> dict[str, Any]:
    """Poll and return the order that is of `kind`; it must be the only one not acknowledged."""
    orders = caller.poll(after)
    assert [order["kind"] for order in orders] == [kind]
    return orders[0]


@pytest.mark.timeout(60)
def test_a_poll_for_orders_of_a_dead_coordinator_takes_none_of_its_successor_away(tmp_path: Path) -> None:
    """As a poll that waited for the connection to come back: by then the other thread may have said hello,
    and what the poll acknowledges was the dead coordinator's. A publisher lost its transfer so, and all
    waited for the deadline of the round; a receiver lost its offer."""
    address = f"ipc://{tmp_path}/c"
    with two_peers(address) as (publisher, receiver):
        with coordinator(7, address):
            receiver.say_hello()
            publisher.say_hello()
            offer = take(receiver, "offer", after=0)
            receiver.report("accepted", round=offer["fields"]["round"])
            had_received = take(receiver, "transfer", after=offer["seq"])["seq"]
            had_sent = take(publisher, "transfer", after=0)["seq"]
        with coordinator(8, address):
            for peer in (publisher, receiver):
                peer.connect_anew()
                peer.say_hello()
            receiver.poll(after=had_received)
            offer = take(receiver, "offer", after=0)
            receiver.report("accepted", round=offer["fields"]["round"])
            publisher.poll(after=had_sent)
            assert take(publisher, "transfer", after=0)["fields"]["number"] == 1


@contextmanager
def silent_session(address: str, heard: list[str]) -> Iterator[CoordinatorSession]:
    """A receiver's session whose threads do not run: the test does one thing after another."""
    hello = receiver_hello("receiver.0", "1", **FLAGS)
    made = CoordinatorSession(
        ThreadRuntime(),
        address,
        "receiver.0",
        "1",
        lambda: Introduction(hello),
        lambda order, _: heard.append(order.kind),
    )
    try:
        yield made
    finally:
        made._orders_client.close()
        made._reports_client.close()


def test_a_report_that_finds_a_new_coordinator_is_taken_after_one_hello(tmp_path: Path) -> None:
    """If it is not, a second hello follows, which ends the round that the first one has begun."""
    address = f"ipc://{tmp_path}/c"
    heard: list[str] = []
    with coordinator(7, address), silent_session(address, heard) as session:
        assert session._try_report(_Report(Attended(), (), 1))
        assert not heard and not session._must_say_hello.is_set()


@contextmanager
def answering(address: str, answer: Callable[[str], dict[str, Any]]) -> Iterator[list[str]]:
    """Answers each call with what `answer` makes of its name; yields the names, in order."""
    asked: list[str] = []

    class Scripted:
        def handle(self, request: Request) -> None:
            asked.append(request.op)
            request.reply(token=1, **answer(request.op))

        def wake_at(self) -> float:
            return math.inf

        def tick(self, now: float) -> None:
            return

    with in_thread(partial(Server(ThreadRuntime(), address).serve, Scripted())):
        yield asked


def test_who_is_told_that_it_is_unknown_says_no_hello_if_its_other_thread_has_done_so_since(
    tmp_path: Path,
) -> None:
    """A second hello would end the round that the first one has begun."""
    address = f"ipc://{tmp_path}/c"
    with silent_session(address, []) as session:

        def answer(op: str) -> dict[str, Any]:
            if op == "hello":
                return {"poll_s": 0.1, "accepted": True}
            is_known = session._session > 1
            session._session = 2  # the other thread says hello while this answer is on its way
            if is_known:
                session._stop.set()
                session._reports.put(None)
            return {"known": is_known, "orders": [], "fenced": False}

        with answering(address, answer) as asked:
            session._follow_orders()
        assert asked == ["hello", "next_order", "next_order"]


class PassingLock:
    """The other thread says hello while this one waits for the lock."""

    def __init__(self, session: CoordinatorSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session._session += 1

    def __exit__(self, *error: object) -> None:
        return


def test_who_has_waited_for_the_hello_of_its_other_thread_says_no_second_one(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/c"
    with silent_session(address, []) as session:
        session._hello_lock = PassingLock(session)  # type: ignore[assignment]
        with answering(address, lambda op: {"known": session._session > 0}) as asked:
            assert session._try_report(_Report(Attended(), (), 1))
        assert asked == ["report", "report"]


def test_a_hello_with_an_answer_that_cannot_be_read_is_said_again(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/c"
    with silent_session(address, []) as session, answering(address, lambda op: {}):
        session._must_say_hello.set()
        with pytest.raises(WireError):
            session._say_hello(session._reports_client, 0)
        assert session._must_say_hello.is_set()


def test_reports_go_on_after_one_that_found_no_descriptor_left(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/c"
    with silent_session(address, []) as session:
        introduce, failures = session._introduce, [OSError(24, "Too many open files")] * MAX_TRIES

        def introduce_later() -> Introduction:
            if failures:
                raise failures.pop()
            return introduce()

        def answer(op: str) -> dict[str, Any]:
            is_known = session._session > 0
            if op == "report" and is_known:
                session._stop.set()
                session._reports.put(None)
            return {"known": is_known} if op == "report" else {"poll_s": 0.1, "accepted": True}

        session._introduce = introduce_later
        session.report(Attended())
        session.report(Attended())
        with answering(address, answer) as asked:
            session._send_reports()
        assert session.counters["lost_reports"] == 1 and not failures
        assert asked == ["report"] * (MAX_TRIES + 1) + ["hello", "report"]


def test_a_report_that_is_refused_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"ipc://{tmp_path}/c"
    with silent_session(address, []) as session:

        def refuse(op: str) -> dict[str, Any]:
            session._stop.set()  # so that nobody waits for the next try
            raise WireError("a version of other tensors")

        with answering(address, refuse):
            assert not session._try_report(_Report(Attended(), (), 1))
    assert "refused the report 'attended': a version of other tensors" in caplog.text
    assert session.counters["coordinator_unreachable"] == 0


def test_a_connection_that_cannot_be_made_anew_leaves_the_one_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> Client:
        raise OSError(24, "Too many open files")

    with silent_session(f"ipc://{tmp_path}/c", []) as session, monkeypatch.context() as patched:
        patched.setattr("weight_sync.coordinator_session.Client", fail)
        assert session._connect_anew(session._orders_client) is session._orders_client


@pytest.mark.long
def test_a_hello_that_nobody_answered_is_said_again(tmp_path: Path) -> None:
    with silent_session(f"ipc://{tmp_path}/nobody", []) as session:
        session._must_say_hello.set()
        with pytest.raises(AsyncrlError):
            session._say_hello(session._reports_client, 0)
        assert session._must_say_hello.is_set()
