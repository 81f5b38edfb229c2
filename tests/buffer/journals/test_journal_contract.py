"""Contract of every journal: one suite for files, Redis and the simulator, parts of it for none."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.buffer.journals.journal import Journal, Need
from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.events import Event, Opened
from asyncrl.buffer.ledger.tickets import State
from asyncrl.core.errors import CheckpointError
from asyncrl.core.experience import encode_group
from tests.buffer.journals.journal_parts import Place, begin, commit, push
from tests.buffer.parts import make_group, make_store

REMEMBERING = ("file", "redis", "simulated")


@pytest.fixture(params=REMEMBERING)
def place(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> Place:
    return Place(request.param, tmp_path, redis_server if request.param == "redis" else None)


@pytest.fixture(params=["none", *REMEMBERING])
def journal(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer):
    if request.param == "none":
        opened: Journal = MemoryJournal()
    else:
        opened = Place(request.param, tmp_path, redis_server if request.param == "redis" else None).open()
    yield opened
    opened.close()


def opened(*tokens: int) -> list[Event]:
    return [Opened(token, "learner") for token in tokens]


# Any journal


def test_a_new_journal_remembers_nothing(journal: Journal) -> None:
    past = journal.recover()
    assert (past.snapshot, list(past.events)) == (None, [])
    assert journal.read(1, 1) is None
    assert not journal.holds(1, 1)


def test_any_journal_takes_what_a_buffer_gives_it(journal: Journal) -> None:
    journal.append(1, 1, [b"x", b""])
    assert journal.commit(opened(1), 0.0)
    journal.tick(0.0)
    journal.release(1)
    journal.keep_only({2})
    journal.write_snapshot({"any": 1})
    assert journal.commit([], 0.0)
    assert journal.need is Need.NOTHING
    assert journal.status().is_away is False


# Journals that remember


def test_events_come_back_in_order(place: Place) -> None:
    journal = place.open()
    journal.commit(opened(1, 2), 0.0)
    journal.commit(opened(3), 0.0)
    journal.commit([], 0.0)
    journal.close()
    again = place.open()
    assert list(again.recover().events) == opened(1, 2, 3)
    again.commit(opened(4), 0.0)
    again.close()
    last = place.open()
    assert list(last.recover().events) == opened(1, 2, 3, 4)
    last.close()


def test_payloads_come_back_frame_by_frame(place: Place) -> None:
    journal = place.open()
    journal.append(7, 2, [b"x" * 200, b"", memoryview(b"y" * 3)])
    journal.append(8, 1, [b"z" * 70_000])
    assert journal.commit(opened(1), 0.0)
    journal.close()
    again = place.open()
    again.recover()
    assert again.holds(7, 2)
    assert again.read(7, 2) == [b"x" * 200, b"", b"y" * 3]
    assert again.read(8, 1) == [b"z" * 70_000]
    again.close()


def test_a_payload_can_be_read_before_it_is_committed(place: Place) -> None:
    journal = place.open()
    journal.append(7, 1, [b"x"])
    assert journal.read(7, 1) == [b"x"]
    journal.close()


def test_each_attempt_has_its_own_payload_and_the_last_one_counts(place: Place) -> None:
    journal = place.open()
    journal.append(1, 2, [b"x"])
    journal.commit(opened(1), 0.0)
    assert journal.read(1, 1) is None
    assert not journal.holds(1, 1)
    journal.append(1, 3, [b"y"])
    journal.commit(opened(2), 0.0)
    assert (journal.read(1, 2), journal.read(1, 3)) == ([b"x"], [b"y"])
    journal.append(1, 3, [b"z"])
    journal.commit(opened(3), 0.0)
    journal.close()
    again = place.open()
    again.recover()
    assert (again.read(1, 2), again.read(1, 3)) == ([b"x"], [b"z"])
    again.release(1)
    assert (again.holds(1, 2), again.holds(1, 3)) == (False, False)
    again.close()


def test_what_is_released_is_gone_after_a_restart_and_the_rest_is_not(place: Place) -> None:
    journal = place.open()
    for ticket in (1, 2, 3):
        journal.append(ticket, 1, [b"x" * 100])
    journal.commit(opened(1), 0.0)
    journal.release(1)
    journal.keep_only({3, 4})
    journal.commit(opened(2), 0.0)
    assert [journal.holds(ticket, 1) for ticket in (1, 2, 3)] == [False, False, True]
    journal.close()
    again = place.open()
    again.recover()
    again.keep_only({3})
    assert [again.read(ticket, 1) for ticket in (1, 2, 3)] == [None, None, [b"x" * 100]]
    again.close()


def test_a_restart_begins_at_the_snapshot_and_goes_on_with_the_events_after_it(place: Place) -> None:
    journal = place.open()
    journal.commit(opened(1), 0.0)
    journal.write_snapshot({"number": 1, "by_step": {3: [1, 2]}})
    journal.commit(opened(2), 0.0)
    journal.commit(opened(3), 0.0)
    journal.close()
    again = place.open()
    past = again.recover()
    assert (past.snapshot, list(past.events)) == ({"number": 1, "by_step": {3: [1, 2]}}, opened(2, 3))
    again.write_snapshot({"number": 2})
    again.close()
    last = place.open()
    past = last.recover()
    assert (past.snapshot, list(past.events)) == ({"number": 2}, [])
    last.close()


def test_a_snapshot_is_asked_for_after_so_many_events(place: Place) -> None:
    place.settings["events_per_snapshot"] = 3
    journal = place.open()
    journal.commit(opened(1, 2), 0.0)
    assert journal.need is Need.NOTHING
    journal.commit(opened(3), 0.0)
    assert journal.need is Need.SNAPSHOT
    journal.write_snapshot({})
    assert journal.need is Need.NOTHING
    journal.close()


def test_the_events_of_a_turn_that_was_not_committed_are_not_there(place: Place) -> None:
    store = place.open_store()
    begin(store)
    commit(store)
    push(store)
    store.journal.close()  # the process ends before it commits
    again = place.open_store()
    assert again.ledger.state.num_issued == 0
    assert not again.journal.holds(1, 1)
    again.journal.close()


def test_a_damaged_payload_is_found_when_it_is_read_and_its_ticket_issued_again(place: Place) -> None:
    store = place.open_store()
    token = begin(store)
    tickets = [push(store), push(store)]
    commit(store)
    store.journal.close()
    place.damage_payload(2)
    again = place.open_store()
    assert again.ledger.state.counts[State.STORED] == 2, "no body is read at the start"
    again.ledger.reserve(token, 0, 0.0)
    payloads, lost = again.fetch(tickets)
    assert (len(payloads), lost) == (1, [2])
    assert (again.ledger.state.tickets[2].state, again.ledger.state.tickets[2].attempt) == (State.ISSUED, 2)
    assert again.journal.counters["damaged_payloads"] == 1
    assert take_census(again.ledger.state).residue == 0
    again.journal.close()


def test_a_ledger_comes_back_as_it_was(place: Place) -> None:
    place.settings["events_per_snapshot"] = 6
    store = place.open_store()
    token = begin(store)
    tickets = [push(store), push(store)]
    commit(store)
    store.ledger.reserve(token, 0, 0.0)
    commit(store)
    store.journal.close()
    again = place.open_store()
    for ticket in again.ledger.state.tickets.values():
        ticket.deadline = store.ledger.state.tickets[ticket.id].deadline
    assert again.ledger.state.as_values() == store.ledger.state.as_values()
    payloads, lost = again.fetch(tickets)
    assert (payloads, lost) == ([encode_group(make_group(ticket)) for ticket in tickets], [])
    again.journal.close()


def test_trained_payloads_stay_for_the_replay_until_a_checkpoint_has_passed_them(place: Place) -> None:
    store = place.open_store()
    token = begin(store)
    tickets = [push(store), push(store)]
    commit(store)
    store.ledger.reserve(token, 0, 0.0)
    store.ledger.trained(token, 0)
    commit(store)
    token = store.ledger.open("successor")
    store.resume(token, 0)
    assert [len(payload) for payload in store.fetch(tickets)[0]] == [7, 7]
    store.ledger.trained(token, 0)
    store.ledger.checkpointed(token, 1, "digest", [1])
    commit(store)
    assert [store.journal.read(ticket, 1) for ticket in tickets] == [None, None]
    store.journal.close()


def test_without_a_journal_a_resume_generates_trained_groups_again() -> None:
    store = make_store()
    token = begin(store)
    push(store), push(store)
    commit(store)
    store.ledger.reserve(token, 0, 0.0)
    store.ledger.trained(token, 0)
    commit(store)
    token = store.ledger.open("successor")
    store.resume(token, 0)
    assert store.ledger.state.counts[State.ISSUED] == 2
    assert take_census(store.ledger.state).residue == 0


def test_an_altered_turn_is_refused(tmp_path: Path, redis_server: RedisServer) -> None:
    place = Place("redis", tmp_path, redis_server)
    journal = place.open()
    journal.commit(opened(1), 0.0)
    journal.close()
    place.damage_turn()
    again = place.open()
    with pytest.raises(CheckpointError, match="commit 1 of the journal is damaged"):
        again.recover()
    again.close()
