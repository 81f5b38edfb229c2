"""A batch that is reserved in parts, as its groups finish: exactly once, and again in the same parts."""

from __future__ import annotations

import msgpack
import pytest

from asyncrl.buffer.ledger.events import pack, unpack
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import Grant, State
from asyncrl.core.errors import FencedError, LedgerError
from tests.buffer.ledger.parts.ledger_runs import GROUP_BYTES, Run

SIZES = {"groups_per_step": 4, "memory_bytes": 16 * GROUP_BYTES}


def take(run: Run, have: list[int], at_least: int = 1, now: float = 0.0) -> list[int] | None:
    part = run.ledger.reserve_part(run.token, run.state.steps_trained, now, have, at_least)
    return None if part is None else [ticket.id for ticket in part]


def begin(run: Run, *order: int) -> list[Grant]:
    """Lease four groups; store those at `order`, one after the other, each taken as a part."""
    grants = run.lease(want=4)
    have: list[int] = []
    for index in order:
        run.store(grants[index])
        part = take(run, have)
        assert part == [grants[index].ticket]
        have += part
    return grants


def test_a_part_is_what_is_complete_and_the_parts_together_are_the_batch() -> None:
    run = Run(**SIZES)
    grants = run.lease(want=4)
    assert take(run, []) is None
    run.store(grants[2]), run.store(grants[1])
    first = take(run, [])
    assert first == [grants[1].ticket, grants[2].ticket] and not run.ledger.is_whole(0, first)
    assert take(run, first) is None
    with pytest.raises(LedgerError, match="is not reserved"):
        run.ledger.trained(run.token, 0)
    run.store(grants[3]), run.store(grants[0])
    last = take(run, first)
    assert last == [grants[0].ticket, grants[3].ticket] and run.ledger.is_whole(0, first + last)
    assert take(run, first + last) is None
    run.ledger.trained(run.token, 0)
    assert run.residue == 0 and run.state.counts[State.TRAINED] == 4


def test_an_answer_that_was_lost_is_given_again() -> None:
    run = Run(**SIZES)
    grants = begin(run, 2, 0)
    assert take(run, [grants[2].ticket]) == [grants[0].ticket]
    assert take(run, []) == [grants[2].ticket]


def test_a_part_that_ranks_could_not_share_waits_for_more_unless_it_is_the_rest() -> None:
    run = Run(**SIZES)
    grants = run.lease(want=4)
    run.store(grants[3])
    assert take(run, [], at_least=2) is None
    run.store(grants[1]), run.store(grants[0])
    have = take(run, [], at_least=2)
    assert have == [grants[0].ticket, grants[1].ticket, grants[3].ticket]
    run.store(grants[2])
    assert take(run, have, at_least=2) == [grants[2].ticket]


def test_a_new_learner_gets_the_parts_of_the_step_that_died_first_and_in_their_order() -> None:
    run = Run(**SIZES)
    grants = begin(run, 3, 1)
    run.reopen(0)
    run.store(grants[0])
    have: list[int] = []
    for wanted in ([grants[3].ticket], [grants[1].ticket], [grants[0].ticket]):
        assert take(run, have) == wanted
        have += wanted
    assert run.residue == 0


def test_a_replayed_step_has_the_parts_that_it_was_trained_in() -> None:
    run = Run(**SIZES)
    grants = begin(run, 3, 1, 0, 2)
    run.ledger.trained(run.token, 0)
    run.reopen(0)
    have: list[int] = []
    for index in (3, 1, 0, 2):
        assert take(run, have) == [grants[index].ticket]
        have.append(grants[index].ticket)
    assert run.ledger.is_whole(0, have)


def test_who_does_not_stream_gets_the_whole_batch_of_a_step_that_was_begun_in_parts() -> None:
    run = Run(**SIZES)
    grants = begin(run, 3, 1)
    run.reopen(0)
    assert run.ledger.reserve(run.token, 0, 0.0) is None
    run.store(grants[0]), run.store(grants[2])
    batch = run.ledger.reserve(run.token, 0, 0.0)
    assert batch is not None and [one.id for one in batch] == sorted(grant.ticket for grant in grants)
    assert take(run, []) == [grants[3].ticket], "the parts are as they were reserved"


def test_what_was_reserved_whole_is_one_part() -> None:
    run = Run(**SIZES)
    tickets = run.train()
    run.reopen(0)
    assert take(run, []) == tickets and run.ledger.is_whole(0, tickets)


def test_parts_outlive_the_journal_and_a_snapshot() -> None:
    run = Run(**SIZES)
    grants = begin(run, 3, 1)
    events = [unpack(msgpack.unpackb(msgpack.packb(pack(event)))) for event in run.ledger.drain_events()]
    replayed = Ledger.replay(run.ledger.settings, events)
    values = msgpack.unpackb(msgpack.packb(run.state.as_snapshot()), strict_map_key=False)
    read = LedgerState.from_snapshot(run.ledger.settings, values)
    assert replayed.state.as_values() == run.state.as_values() == read.as_values()
    part = replayed.reserve_part(run.token, 0, 0.0, [grants[3].ticket])
    assert part is not None and [one.id for one in part] == [grants[1].ticket]
    del values["parts"]  # as one wrote that knew no parts
    assert LedgerState.from_snapshot(run.ledger.settings, values).parts == {}


def test_a_group_whose_payload_is_lost_leaves_its_part_and_the_learner_is_told() -> None:
    run = Run(**SIZES)
    grants = begin(run, 3, 1)
    run.ledger.lose_payload(grants[3].ticket)
    with pytest.raises(LedgerError, match="which are not reserved"):
        take(run, [grants[3].ticket, grants[1].ticket])
    run.reopen(0)
    assert take(run, []) == [grants[1].ticket]
    run.store(run.lease()[0])
    assert take(run, [grants[1].ticket]) == [grants[3].ticket], "it comes again as a part of its own"
    assert run.residue == 0


def test_questions_that_no_learner_asks_get_an_answer_too() -> None:
    run = Run(**SIZES)
    grants = run.lease(want=4)
    assert take(run, [], at_least=0) is None and take(run, [], at_least=-3) is None
    for grant in grants[:2]:
        run.store(grant)
    part = take(run, [], at_least=2)
    assert part is not None and take(run, part[:1]) == part, "half of a part is none"


def test_an_older_learner_gets_no_part() -> None:
    run = Run(**SIZES)
    begin(run, 0)
    token = run.token
    run.reopen(0)
    with pytest.raises(FencedError):
        run.ledger.reserve_part(token, 0, 0.0, [])


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_admission_goes_on_as_if_nothing_were_taken_yet(max_lag: int) -> None:
    streamed, whole = (Run(**SIZES | {"max_lag": max_lag}) for _ in range(2))
    begin(streamed, 0, 2)
    grants = whole.lease(want=4)
    whole.store(grants[0]), whole.store(grants[2])
    for _ in range(8):
        ours, theirs = streamed.lease(), whole.lease()
        assert [one.ticket for one in ours] == [one.ticket for one in theirs]
        for one in ours:
            places = (run.state.tickets[one.ticket].position // 4 for run in (streamed, whole))
            assert len(set(places)) == 1


def test_nothing_computed_is_dropped_for_its_age_and_what_comes_late_is() -> None:
    run = Run(policy="drop", **SIZES)
    (slow,) = run.lease(replica="slow")
    run.train(), run.train()
    grants = run.lease(want=3)
    run.store(grants[0])
    have = take(run, [])
    run.store(slow, version=1)
    assert take(run, have or []) is None
    assert run.state.tickets[slow.ticket].state is State.DROPPED
    assert have == [grants[0].ticket] and run.state.tickets[have[0]].state is State.RESERVED
    assert run.residue == 0


def test_wait_keeps_places_for_groups_that_are_in_bound_for_this_step_only() -> None:
    run = Run(policy="wait", max_wait_s=5.0, **SIZES | {"max_lag": 1})
    (slow,) = run.lease(replica="slow")
    run.train()
    others = run.lease(want=4)
    for grant in others[:3]:
        run.store(grant)
    have = take(run, [])
    assert have == [grant.ticket for grant in others[:3]], "a place is left"
    run.store(others[3])
    assert take(run, have, now=1.0) is None, "and kept for the slow one"
    run.store(slow, version=1)
    assert take(run, have, now=2.0) == [slow.ticket]
    assert run.ledger.is_whole(1, [*have, slow.ticket])


def test_wait_ends_after_its_time_in_a_streamed_step_too() -> None:
    run = Run(policy="wait", max_wait_s=5.0, **SIZES | {"max_lag": 1})
    run.lease(replica="slow")
    run.train()
    others = run.lease(want=4)
    for grant in others:
        run.store(grant)
    have = take(run, [], now=1.0)
    assert have == [grant.ticket for grant in others[:3]]
    assert take(run, have, now=5.9) is None
    assert take(run, have, now=6.0) == [others[3].ticket]


def test_pace_is_set_when_the_batch_is_whole() -> None:
    run = Run(**SIZES)
    grants = begin(run, 0, 1)
    assert run.state.paced_open_tickets == 0
    run.store(grants[2]), run.store(grants[3])
    take(run, [grants[0].ticket, grants[1].ticket])
    assert run.state.paced_open_tickets > 0
