"""Lease rules of a replica: its calls, the attempts that it says it holds, its drain."""

from __future__ import annotations

import pytest

from asyncrl.buffer.rules.replica import (
    CALL_ATTEMPTS,
    INTERRUPT_DEADLINE_S,
    DrainStage,
    HeldOrder,
    Leasing,
    Tries,
    count_free_groups,
    count_max_groups,
    is_order_good,
    may_lease,
    plan_drain,
)
from asyncrl.core.states import ServiceState

HELD = ((1, 1), (2, 3))


def test_a_call_is_made_once_until_it_has_ended():
    leasing = Leasing()
    first = leasing.next_call(1, 4, HELD)
    assert first is not None
    assert (first.version, first.want, first.held) == (1, 4, None)
    assert leasing.next_call(1, 4, HELD) is None
    assert leasing.next_call(1, 2, HELD) is None
    leasing.end(first, is_answered=True)
    assert leasing.next_call(1, 2, HELD) is not None


def test_a_new_version_is_asked_for_while_the_call_under_the_older_one_is_out():
    leasing = Leasing()
    first, second = leasing.next_call(1, 4, HELD), leasing.next_call(2, 4, HELD)
    assert first is not None and second is not None
    leasing.end(first, is_answered=True)
    assert leasing.next_call(2, 4, HELD) is None, "the newest is out"
    leasing.end(second, is_answered=True)
    assert leasing.next_call(2, 4, HELD) is not None


def test_a_full_replica_asks_for_nothing_unless_it_waits_for_an_evaluation():
    leasing = Leasing()
    assert leasing.next_call(1, 0, HELD) is None
    assert leasing.next_call(1, 0, HELD, asks_when_full=True) is not None
    assert leasing.next_call(1, 0, HELD, asks_when_full=True) is None
    assert leasing.next_call(1, 1, HELD, asks_when_full=True) is not None, "there is room now"
    assert leasing.next_call(1, 2, HELD, asks_when_full=True) is None


def test_after_a_call_without_an_answer_the_next_one_says_what_is_held_until_it_is_answered():
    leasing = Leasing()
    for _ in range(2):
        lost = leasing.next_call(1, 4, HELD)
        assert lost is not None
        leasing.end(lost, is_answered=False)
    told = leasing.next_call(1, 4, HELD)
    assert told is not None and told.held == HELD
    leasing.end(told, is_answered=True)
    after = leasing.next_call(1, 4, HELD)
    assert after is not None and after.held is None


def test_what_is_held_is_not_said_while_grants_may_be_on_their_way():
    leasing = Leasing()
    older, newer = leasing.next_call(1, 4, HELD), leasing.next_call(2, 4, HELD)
    assert older is not None and newer is not None
    leasing.end(newer, is_answered=False)
    other = leasing.next_call(2, 4, HELD)
    assert other is not None and other.held is None, "the call of version 1 may still bring grants"
    leasing.end(older, is_answered=True)
    leasing.end(other, is_answered=True)
    last = leasing.next_call(2, 4, HELD)
    assert last is not None and last.held == HELD


@pytest.mark.parametrize("state", ServiceState)
def test_only_a_ready_replica_asks(state: ServiceState):
    assert may_lease(state, is_fenced=False, is_standby=False) == (state is ServiceState.READY)
    assert not may_lease(state, is_fenced=True, is_standby=False)
    assert not may_lease(state, is_fenced=False, is_standby=True)


def test_samples_that_have_ended_make_room_for_whole_groups_alone():
    assert count_max_groups(max_sequences=16, num_samples=4) == 5
    assert [count_free_groups(20, 4, unfinished) for unfinished in (20, 17, 16, 0, 99)] == [
        0,
        0,
        1,
        5,
        0,
    ]
    assert count_max_groups(max_sequences=1, num_samples=8) == 2


def test_a_drain_lets_groups_end_then_interrupts_them():
    assert plan_drain(0.0, resumes_partial=False) == ()
    both = ((DrainStage.FINISH, 7.0), (DrainStage.INTERRUPT, INTERRUPT_DEADLINE_S))
    assert plan_drain(7.0, resumes_partial=True) == both
    assert plan_drain(7.0, resumes_partial=False) == both[:1]


def test_an_order_is_taken_once_and_forgotten_with_its_last_part():
    order = HeldOrder()
    assert order.take(5) and not order.take(5)
    order.end(5, has_more=True)
    assert order.number == 5
    order.end(4, has_more=False)
    assert order.number == 5
    order.end(5, has_more=False)
    assert order.number is None
    assert order.take(5)
    order.forget()
    assert order.number is None
    assert is_order_good(3, 3) and not is_order_good(3, 4)


def test_a_call_is_repeated_until_its_tries_are_spent():
    tries = Tries()
    assert [tries.may_repeat() for _ in range(CALL_ATTEMPTS)] == [True] * (CALL_ATTEMPTS - 1) + [False]


def test_a_call_that_says_what_the_replica_holds_stays_the_only_one_out():
    leasing = Leasing()
    lost = leasing.next_call(1, 2, ())
    assert lost is not None
    leasing.end(lost, is_answered=False)
    telling = leasing.next_call(1, 2, ((7, 1),))
    assert telling is not None and telling.held == ((7, 1),)
    assert leasing.next_call(2, 2, ((7, 1),)) is None, (
        "a newer version waits: a grant could be lost beside it"
    )
    leasing.end(telling, is_answered=True)
    newer = leasing.next_call(2, 2, ((7, 1),))
    assert newer is not None and newer.held is None
