"""Desk of direct transfers: seats that ask for orders, and what their silence, end or change leads to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import Message, fields_of
from asyncrl.core.rpc.operations import Operations
from asyncrl.core.wire import unpack_map
from tests.runtimes import ManualClock
from weight_sync.backends.contract import Group
from weight_sync.direct.desk import CARRYING_SILENCE_S, SILENCE_S, Desk
from weight_sync.direct.orders import ASK_ORDER, SEAT_ENDED, AskOrder, SeatEnded, SeatOrder
from weight_sync.protocol.rounds import DIGEST, TRANSPORT
from weight_sync.transfer_executor import TransferOrder

ORDER = TransferOrder(7, 3, Group(11, 4, 6, "127.0.0.1", 1), frozenset({11}), 5.0, sources=4)


class Room:
    """A desk with seats that ask by hand; `answers` by seat, as they came."""

    def __init__(self, count: int = 2) -> None:
        self.clock, self.count = ManualClock(), count
        self.desk = Desk(self.clock, "00" * 32)
        self.changes: list[int] = []
        self.desk.on_change = lambda: self.changes.append(self.desk.num_seats)
        self.losses = 0
        self.desk.on_loss = self.lose
        self.ends: list[tuple[str, str, int]] = []
        self.steps: list[int] = []
        self.answers: dict[int, list[SeatOrder]] = {index: [] for index in range(count)}
        self.ops = Operations("the desk")
        self.desk.add_operations(self.ops)

    def lose(self) -> None:
        self.losses += 1

    def call(self, op: str, index: int, asked: Message) -> None:
        def answer(frames: Sequence[Any]) -> None:
            if op == ASK_ORDER.name:
                args = unpack_map(frames[0], "an answer", 1 << 16)["args"]
                self.answers[index].append(msgspec.convert(args, SeatOrder))

        self.ops.handle(Request(op, fields_of(asked), [], b"", 1, answer))

    def ask(self, index: int, round_id: int = 0, incarnation: str = "1", num_steps: int = 0) -> None:
        asked = AskOrder(
            index=index,
            count=self.count,
            incarnation=incarnation,
            round=round_id,
            num_steps=num_steps,
            wait_s=1.0,
        )
        self.call(ASK_ORDER.name, index, asked)

    def end(self, index: int, cause: str = "", round_id: int = 7) -> None:
        told = SeatEnded(
            index=index, count=self.count, incarnation="1", round=round_id, cause=cause, num_bytes=10
        )
        self.call(SEAT_ENDED.name, index, told)

    def carry(self) -> None:
        self.desk.carry(ORDER, (2, 1), self.steps.append, lambda *end: self.ends.append(end))


def test_the_seats_are_told_of_once_all_of_them_ask():
    room = Room()
    room.ask(0)
    assert room.desk.num_seats == 0 and not room.changes
    room.ask(1)
    assert room.desk.num_seats == 2 and room.changes == [2]


def test_a_transfer_answers_all_polls_with_an_order_of_its_own_rank_each():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.carry()
    (first,), (second,) = room.answers[0], room.answers[1]
    assert (first.round, first.rank, second.rank, first.world, first.num_sources) == (7, 4, 5, 6, 4)
    assert first.keep == (1, 2) and first.secret == second.secret != "00" * 32
    assert first.secret not in repr(first)


def test_a_transfer_is_done_when_all_seats_have_ended_it_and_counts_their_bytes_once():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.carry()
    room.end(0)
    room.end(0)
    assert not room.ends
    room.end(1)
    room.end(1)
    assert room.ends == [("", "", 20)]


def test_the_first_seat_that_fails_ends_the_transfer_and_the_others_are_told_to_give_it_up():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.carry()
    room.ask(0, round_id=7)
    room.end(1, DIGEST)
    assert [cause for cause, _, _ in room.ends] == [DIGEST]
    assert room.answers[0][-1].round == 0
    room.end(0)
    assert len(room.ends) == 1


def test_an_abort_is_told_to_the_seats_and_ends_without_a_call():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.carry()
    room.ask(0, round_id=7)
    room.desk.abort(6)
    assert len(room.answers[0]) == 1
    room.desk.abort(7)
    assert room.answers[0][-1].round == 0 and not room.ends
    room.end(0)
    assert not room.ends


def test_a_seat_that_knows_another_round_is_answered_at_once_and_one_that_knows_it_waits():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.carry()
    room.ask(0, round_id=7)
    assert len(room.answers[0]) == 1
    room.ask(0)
    assert [one.round for one in room.answers[0]] == [7, 7, 7], "the parked poll, and the new one"


def test_a_poll_ends_when_its_time_is_over():
    room = Room()
    room.ask(0)
    assert room.desk.wake_at() == 1.0
    room.clock.advance(1.0)
    room.desk.tick()
    assert [one.round for one in room.answers[0]] == [0]


def test_a_silent_seat_ends_the_transfer_and_the_service_is_told_that_not_all_are_there():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.carry()
    room.clock.advance(CARRYING_SILENCE_S - 1)
    room.ask(0, round_id=7)
    assert room.desk.wake_at() == CARRYING_SILENCE_S
    room.clock.advance(1.0)
    room.desk.tick()
    assert room.ends == [(TRANSPORT, "seat 1 is silent", 0)]
    assert room.desk.num_seats == 0 and room.changes == [2, 0]


def test_a_seat_that_carries_nothing_may_be_silent_for_longer():
    """Before a transfer, and in one that it has ended."""
    room = Room()
    room.ask(0)
    room.ask(1)
    room.clock.advance(SILENCE_S - 2)
    room.desk.tick()
    room.ask(0)
    room.ask(1)
    room.carry()
    room.end(1)
    room.clock.advance(CARRYING_SILENCE_S - 1)
    room.ask(0, round_id=7)
    room.clock.advance(1.0)
    room.desk.tick()
    assert room.changes == [2] and not room.ends
    room.clock.advance(SILENCE_S - CARRYING_SILENCE_S)
    room.ask(0, round_id=7)
    room.desk.tick()
    assert room.changes == [2, 0]


def test_a_seat_that_is_another_process_ends_the_transfer_and_is_told_of():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.carry()
    room.ask(1, incarnation="2")
    assert room.ends == [(TRANSPORT, "seat 1 is another process", 0)] and room.losses == 3
    room.ask(0)
    assert room.changes == [2, 0, 2]


def test_after_a_failure_or_an_abort_no_seat_counts_before_it_has_asked_again():
    for fail in (lambda room: room.desk.abort(7), lambda room: room.end(0, TRANSPORT)):
        room = Room()
        room.ask(0)
        room.ask(1)
        room.carry()
        fail(room)
        room.ask(0)
        assert room.desk.num_seats == 0 and room.changes == [2, 0], "seat 1 may be dead"
        room.ask(1)
        assert room.changes == [2, 0, 2] and room.losses == 2, "no process is another one"


def test_an_engine_whose_worker_is_another_process_between_two_transfers_is_told_of():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.ask(1, incarnation="2")
    assert room.changes == [2, 2] and room.losses == 3


def test_an_engine_of_another_size_begins_anew():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.count = 1
    room.ask(0)
    assert room.desk.num_seats == 1 and room.changes == [2, 1]


def test_without_all_seats_a_transfer_fails_at_once():
    room = Room()
    room.ask(0)
    room.carry()
    assert [cause for cause, _, _ in room.ends] == [TRANSPORT]


def test_the_steps_of_all_seats_are_told_together_and_those_of_the_round_before_are_forgotten():
    room = Room()
    room.ask(0)
    room.ask(1)
    room.carry()
    room.ask(0, round_id=7, num_steps=3)
    room.ask(1, round_id=7, num_steps=2)
    room.ask(1, round_id=7, num_steps=2)
    assert room.steps == [3, 5]
    room.end(0)
    room.end(1)
    room.carry()
    room.ask(0, round_id=7, num_steps=1)
    assert room.steps == [3, 5, 1]


def test_the_late_end_of_an_earlier_round_ends_nothing():
    room = Room(count=1)
    room.ask(0)
    room.carry()
    room.end(0, DIGEST, round_id=6)
    assert not room.ends
