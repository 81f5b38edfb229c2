"""A learner's wait for a batch that another call cuts short: the buffer's answer is not lost."""

from __future__ import annotations

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.rpc import Client
from asyncrl.core.rpc.client import PendingCall
from tests.buffer.service.test_service import push_one

WAIT_S = 60.0


def begin_wait(raw: Client, wait_s: float = WAIT_S) -> PendingCall:
    """Begin a call that waits for so long: there is no evaluation to answer."""
    return raw.begin("lease", deadline_s=2 * WAIT_S, replica="b", version=1, want=0, wait_s=wait_s)


def test_who_was_cut_short_gets_the_answer_with_the_next_reservation_of_the_same(
    learner: LearnerClient, raw: Client
) -> None:
    assert learner.reserve(0, WAIT_S, until=begin_wait(raw, 0.05)) is None
    push_one(raw), push_one(raw)
    batch = learner.reserve(0, WAIT_S, until=begin_wait(raw))
    assert batch is not None and [one.ticket for one in batch.tickets] == [1, 2]
    assert learner._reserving is None


def test_a_reservation_that_goes_on_is_not_made_a_second_time(learner: LearnerClient, raw: Client) -> None:
    for _ in range(3):
        assert learner.reserve(0, WAIT_S, until=begin_wait(raw, 0.05)) is None
    assert raw.call("status").args["parked"] == 1


def test_another_reservation_than_the_one_that_was_cut_short_gets_its_own_answer(
    learner: LearnerClient, raw: Client
) -> None:
    push_one(raw)
    assert learner.reserve(0, WAIT_S, until=begin_wait(raw, 0.05)) is None
    part = learner.reserve(0, WAIT_S, have=[])
    assert part is not None and not part.is_whole
    assert [one.ticket for one in part.tickets] == [1]
