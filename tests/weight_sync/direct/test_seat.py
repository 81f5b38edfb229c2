"""Seats at the desks of two services, each with a real server: orders, their ends, aborts, absent desks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.runtime.faults import set_hook
from asyncrl.core.runtime.interface import Network
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.weight_sync.direct.members import (
    RUNTIME,
    TIMEOUT,
    WAIT_S,
    ScriptedSink,
    make_checkpoint,
    make_source,
    random_regions,
    take,
)
from tests.weight_sync.direct.service import Service, await_ends, carry
from weight_sync.backends.rendezvous import open_store
from weight_sync.direct.seat import DeskAddress, Seat
from weight_sync.protocol.rounds import DIGEST, SUPERSEDED, TRANSPORT


class ScarceRuntime(ThreadRuntime):
    """One whose next connections find no descriptor left."""

    num_failures = 0

    @property
    def network(self) -> Network:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(24, "Too many open files")
        return super().network


class Run:
    """Two learner ranks at the publisher's desk, two engine workers at a receiver's."""

    def __init__(self) -> None:
        self.secret = "5ec" * 8
        self.store = open_store("127.0.0.1", 0, TIMEOUT)
        self.publisher, self.receiver = Service(self.secret), Service(self.secret)
        self.sources = [make_source(rank) for rank in range(4)]
        self.sinks = [ScriptedSink(random_regions(seed)) for seed in (4, 5)]
        self.goes_on = threading.Event()
        self.seats: list[Seat] = []
        self.runtime = ScarceRuntime()
        for service, parties in ((self.publisher, self.sources), (self.receiver, self.sinks)):
            address = DeskAddress(service.server.address)
            seats = [Seat(self.runtime, address, i, len(parties), party) for i, party in enumerate(parties)]
            self.seats += seats
        for seat in self.seats:
            seat.start()
        for service in (self.publisher, self.receiver):
            assert service.is_complete.wait(WAIT_S)

    def carry(self, number: int, round_id: int, membership: int = 1, deadline_s: float = WAIT_S) -> None:
        where = {"port": self.store.port, "membership": membership, "deadline_s": deadline_s}
        carry(self.publisher, self.receiver, number, round_id, ranks=(4, 2), **where)

    def carry_until_a_source_is_held(self, round_id: int) -> None:
        is_held = threading.Event()
        strike("direct.source.pack", lambda: (is_held.set(), self.goes_on.wait(WAIT_S)))
        self.carry(1, round_id, deadline_s=10 * WAIT_S)
        assert is_held.wait(WAIT_S)

    def await_ends(self) -> list[str]:
        """Return the cause of the end at each desk."""
        return await_ends(self.publisher, self.receiver)

    def close(self) -> None:
        self.goes_on.set()
        for seat in self.seats:
            seat.close()
        self.publisher.close()
        self.receiver.close()


@pytest.fixture
def threads_before() -> set[threading.Thread]:
    return {*threading.enumerate()}


@pytest.fixture
def started() -> Iterator[Run]:
    run = Run()
    yield run
    set_hook(None)
    run.close()


def strike(point: str, act: Callable[[], None], number: int = 1, nth: int = 3) -> None:
    """Have `act` called once, when any member is at pack `nth` of a version."""
    struck: list[int] = []

    def hook(name: str, place: tuple[int | None, ...]) -> None:
        if (name, *place) == (point, number, nth) and not struck:
            struck.append(nth)
            act()

    set_hook(hook)


def test_seats_carry_out_one_order_after_the_other_and_tell_their_ends(started):
    started.carry(1, round_id=7)
    assert started.await_ends() == ["", ""]
    assert all(sink.has_all(1, make_checkpoint(1)) for sink in started.sinks)
    for rank, source in enumerate(started.sources):
        assert take(source, 2, rank)
    started.carry(2, round_id=8)
    assert started.await_ends() == ["", ""]
    assert all(sink.has_all(2, make_checkpoint(2)) for sink in started.sinks)
    wanted = sum(pack.num_bytes for sink in started.sinks for pack in sink.stages[2].packs)
    assert started.receiver.ends[-1][2] == wanted


def test_a_seat_tells_how_far_it_is_while_a_transfer_runs(started):
    has_told = threading.Event()
    started.receiver.progress = Calls(has_told.set)
    strike("direct.source.pack", lambda: has_told.wait(WAIT_S), nth=9)
    started.carry(1, round_id=7)
    assert started.await_ends() == ["", ""]
    assert has_told.is_set()
    assert started.receiver.progress[0] > 0


def test_what_a_seat_did_in_the_round_before_does_not_count_in_the_next_one(started):
    """Else nothing in it is progress, and a round that takes its time is taken for one that stands still."""
    started.carry(1, round_id=7)
    assert started.await_ends() == ["", ""]
    goes_on = threading.Event()
    for rank, source in enumerate(started.sources):
        assert take(source, 2, rank)
    for sink in started.sinks:
        sink.keep = lambda _: goes_on.wait(WAIT_S)  # called before the transfer begins
    started.receiver.progress = []
    started.carry(2, round_id=8)
    end, desk = RUNTIME.now() + WAIT_S, started.receiver.desk
    while desk._transfer is None or not all(seat.parked for seat in desk._seats.values()):
        assert RUNTIME.now() < end, "the seats ask while they carry out the order"
        RUNTIME.sleep(0.01)
    goes_on.set()
    assert not started.receiver.progress
    assert started.await_ends() == ["", ""]


def succeed(secret: str, address: str) -> Service:
    """Return a service at the address of one that has just closed it."""
    end = RUNTIME.now() + WAIT_S
    while True:
        try:
            return Service(secret, address)
        except AsyncrlError:
            if RUNTIME.now() > end:
                raise
            RUNTIME.sleep(0.05)


class Calls(list[int]):
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def append(self, value: int) -> None:
        super().append(value)
        self._call()


def test_an_order_that_is_aborted_is_given_up_and_the_next_one_carried_out(started):
    started.carry_until_a_source_is_held(round_id=7)
    assert all(sink.has_opened.wait(WAIT_S) for sink in started.sinks)
    started.publisher.abort(7)
    started.receiver.abort(7)
    for sink in started.sinks:
        assert sink.stages[1].has_closed.wait(WAIT_S), "the sink waits for packs that do not come"
        assert not sink.stages[1].is_whole
    started.goes_on.set()
    started.carry(1, round_id=8, membership=2)
    assert started.await_ends() == ["", ""]
    assert {tuple(seat._carriers) for seat in started.seats} == {(2,)}, "the first group is not kept"
    assert all(sink.has_all(1, make_checkpoint(1)) for sink in started.sinks)


def test_a_damaged_pack_is_told_with_its_cause(started):
    def change() -> None:
        for sink in started.sinks:
            assert sink.has_opened.wait(WAIT_S)
            sink.stages[1].data[0][:] += 1

    strike("direct.sink.pack", change, nth=0)
    started.carry(1, round_id=7)
    assert started.await_ends() == ["", DIGEST]
    assert "packs came damaged" in started.receiver.ends[-1][1]


def test_a_version_that_is_gone_is_told_with_its_cause(started):
    assert take(started.sources[2], 2, 2)
    started.carry(1, round_id=7)
    assert started.await_ends() == [SUPERSEDED, TRANSPORT]
    assert started.publisher.ends[-1][1] == "seat 2: version 1 was not kept, the newest is 2"
    for thread in threading.enumerate():
        if thread.name == "direct-7":
            thread.join(WAIT_S)
    assert started.seats[2]._carriers[1]._group._is_aborted, "a receiver may wait for this source alone"


def test_what_goes_wrong_in_a_party_is_told_and_the_seat_lives_on(started):
    open_stage = started.sinks[0].open
    started.sinks[0].open = lambda *_: 1 // 0
    started.carry(1, round_id=7)
    assert started.await_ends()[1] == TRANSPORT
    started.sinks[0].open = open_stage
    started.carry(1, round_id=8, membership=2)
    assert started.await_ends() == ["", ""]


def test_a_seat_that_has_found_no_descriptor_left_carries_out_the_order_a_little_later(started):
    started.runtime.num_failures = 2
    started.carry(1, round_id=7)
    assert started.await_ends() == ["", ""]
    assert not started.runtime.num_failures


def test_an_end_that_the_desk_did_not_take_is_told_again(started):
    started.publisher.refused.append("seat_ended")
    started.carry(1, round_id=7)
    assert started.await_ends() == ["", ""]
    assert not started.publisher.refused


def test_a_desk_that_was_away_has_its_seats_back_and_they_give_up_what_its_predecessor_ordered(started):
    started.carry_until_a_source_is_held(round_id=7)
    address = started.publisher.server.address
    started.publisher.close()
    started.publisher = succeed(started.secret, address)
    assert started.publisher.is_complete.wait(WAIT_S)
    assert started.receiver.has_ended.wait(WAIT_S), "the sources have given up"
    assert started.receiver.ends[-1][0] == TRANSPORT
    started.goes_on.set()
    started.carry(1, round_id=8, membership=2)
    assert started.await_ends() == ["", ""]


def test_a_seat_that_closes_gives_up_its_transfer_and_asks_no_more(threads_before, started):
    started.carry_until_a_source_is_held(round_id=7)
    for seat in started.seats[:4]:
        seat.close()
    assert started.receiver.has_ended.wait(WAIT_S)
    assert started.receiver.ends[-1][0] == TRANSPORT
    started.goes_on.set()
    for seat in started.seats[4:]:
        seat.close()
    for thread in {*threading.enumerate()} - threads_before:
        if thread.name == "seat" or thread.name.startswith("direct-"):
            thread.join(WAIT_S)
            assert not thread.is_alive()
