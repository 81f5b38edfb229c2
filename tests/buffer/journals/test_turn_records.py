"""Records of turns in every journal: they outlive the buffer, and go with their ticket."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.buffer.journals.journal import Need
from asyncrl.buffer.journals.kind import NUM_NEWEST
from asyncrl.buffer.journals.records import TURNS_FROM
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.journals.segment_payloads import SegmentPayloads
from asyncrl.buffer.ledger.tickets import Grant
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import WireError
from tests.buffer.journals.journal_parts import Place, begin, commit, push, wipe
from tests.buffer.parts import make_store

RECORDS = [b"first", b"", b"third"]


@pytest.fixture(params=["file", "redis", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> Place:
    return Place(request.param, tmp_path, redis_server if request.param == "redis" else None)


def lease(store: ExperienceStore) -> Grant:
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    return grant


def add(store: ExperienceStore, grant: Grant, number: int, record: bytes) -> str:
    return store.turns.store("a", (grant.ticket, grant.attempt, number), (1, 1), [record])


def add_all(store: ExperienceStore) -> Grant:
    grant = lease(store)
    for number, record in enumerate(RECORDS, 1):
        assert add(store, grant, number, record) == "stored"
    commit(store)
    return grant


def fetch(store: ExperienceStore, grant: Grant) -> list[bytes] | None:
    found = store.fetch_partial("a", grant.ticket, grant.attempt)
    return None if found is None else [bytes(frame) for frame in found]


def test_records_survive_the_buffer_and_come_in_order(place: Place) -> None:
    store = place.open_store()
    begin(store)
    first = add_all(store)
    store.journal.close()
    again = place.open_store()
    assert add(again, first, 4, b"fourth") == "stored", "the lease outlives the buffer too"
    commit(again)
    again.ledger.deregister("a")
    grant = lease(again)
    assert (grant.ticket, grant.attempt, grant.partial_attempt) == (first.ticket, 2, 1)
    assert fetch(again, grant) == [*RECORDS, b"fourth"]
    assert again.fetch_partial("b", grant.ticket, 2) is None, "only for who holds the lease"
    assert add(again, grant, 5, b"fifth") == "stored"
    assert fetch(again, grant) == [*RECORDS, b"fourth", b"fifth"]
    assert again.counters == {}
    again.journal.close()


def test_a_record_that_no_commit_names_is_written_again(place: Place) -> None:
    store = place.open_store()
    begin(store)
    grant = add_all(store)
    store.journal.append(grant.ticket, TURNS_FROM + 4, [b"of a buffer that died before its commit"])
    store.journal.close()
    again = place.open_store()
    assert fetch(again, grant) == RECORDS
    add(again, grant, 4, b"fourth")
    commit(again)
    again.journal.close()
    last = place.open_store()
    assert fetch(last, grant) == [*RECORDS, b"fourth"]
    last.journal.close()


def test_a_record_that_is_damaged_lets_all_of_them_go(place: Place) -> None:
    store = place.open_store()
    begin(store)
    grant = add_all(store)
    store.journal.close()
    if place.kind == "simulated":
        place.disk.payloads[grant.ticket, TURNS_FROM + 3] = []
    else:
        place.damage_payload(grant.ticket)
    again = place.open_store()
    assert fetch(again, grant) is None
    assert (again.counters["lost_partials"], again.ledger.state.partial_bytes) == (1, 0)
    assert add(again, grant, 1, b"anew") == "stored"
    commit(again)
    assert fetch(again, grant) == [b"anew"]
    again.journal.close()


def test_records_are_deleted_with_their_ticket(place: Place) -> None:
    store = place.open_store()
    token = begin(store)
    grant = add_all(store)
    store.ledger.release("a", [(grant.ticket, 1)])
    commit(store)
    assert push(store) == grant.ticket, "the next attempt's"
    commit(store)
    assert store.turns._kept == {}, "a whole group needs none in memory"
    assert store.ledger.state.partial_bytes == 0
    while (batch := store.ledger.reserve(token, 0, 0.0)) is None:
        push(store)
    assert grant.ticket in [ticket.id for ticket in batch]
    store.ledger.trained(token, 0)
    store.ledger.checkpointed(token, 1, "d", [1])
    commit(store)
    assert not any(store.journal.holds(grant.ticket, TURNS_FROM + number) for number in (1, 2, 3))
    store.journal.close()


def test_records_of_a_ticket_that_is_given_up_are_deleted_at_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, max_attempts=1)
    begin(store)
    grant = add_all(store)
    store.ledger.fail("a", grant.ticket, 1)
    commit(store)
    assert not store.journal.holds(grant.ticket, TURNS_FROM + 1)
    assert (store.turns._kept, store.ledger.state.partial_bytes) == ({}, 0)
    store.journal.close()


def test_records_that_a_wiped_redis_lost_are_written_again_from_memory(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    place = Place("redis", tmp_path, own_redis)
    store = place.open_store()
    begin(store)
    grant = add_all(store)
    wipe(own_redis)
    store.ledger.open("successor")
    commit(store)
    assert (store.journal.counters["redis_wiped"], store.journal.need) == (1, Need.NOTHING)
    store.journal.close()
    again = place.open_store()
    assert (fetch(again, grant), again.counters["lost_partials"]) == (RECORDS, 0)
    again.journal.close()


def test_a_record_is_one_frame(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    begin(store)
    grant = lease(store)
    with pytest.raises(WireError, match="a record of turns is one frame, not 2"):
        store.turns.store("a", (grant.ticket, 1, 1), (1, 1), [b"", b""])
    store.journal.close()


def test_records_are_no_groups_to_the_page(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    begin(store)
    push(store)
    grant = lease(store)
    for number in range(1, NUM_NEWEST + 2):
        add(store, grant, number, b"x")
    commit(store)
    assert len(SegmentPayloads(tmp_path / "payloads").newest()) == 1
    store.journal.close()
