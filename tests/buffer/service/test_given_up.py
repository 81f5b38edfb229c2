"""Leases whose callers stopped waiting while the journal was away: nobody holds them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest

from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.ledger.events import Event
from asyncrl.buffer.service import RequestHandler
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.rpc import Client, Request
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.parts import GROUP_SIZE, SETTINGS, serving
from tests.runtimes import ManualClock


class FarJournal(MemoryJournal):
    """Is away while it is told to be."""

    is_away = False
    looked_at = 0.0

    def commit(self, events: Sequence[Event], now: float) -> bool:
        self.looked_at = time.monotonic()
        return not self.is_away

    def wake_at(self) -> float:
        return self.looked_at + 0.01


@pytest.fixture
def journal() -> FarJournal:
    return FarJournal()


@pytest.fixture
def store(journal: FarJournal) -> ExperienceStore:
    store = ExperienceStore(SETTINGS, journal, GROUP_SIZE, True, now=0.0)
    store.ledger.register_version(store.ledger.open("learner"), 0)
    return store


def lease_request(wait_s: float = 1.0, within_s: float = 6.0) -> Request:
    wanted = {"replica": "a", "version": 1, "want": 2, "wait_s": wait_s}
    return Request("lease", wanted, [], b"client", 1, lambda parts: None, within_s=within_s)


def test_a_lease_that_lay_in_the_socket_until_its_caller_gave_up_is_not_granted(
    store: ExperienceStore, journal: FarJournal
) -> None:
    store.ledger.describe_data(100, "digest")
    wanted = {"replica": "a", "version": 1, "want": 1, "wait_s": 0.0}
    with serving(store) as service:
        client = Client(ThreadRuntime(), service.address)
        for _ in range(5):
            client.call("status")  # the quickest of them is what delays are measured against
        journal.is_away = True
        while store.is_committed:
            time.sleep(0.01)
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                client.call("lease", deadline_s=0.2, **wanted)
        time.sleep(1.0)  # far beyond the deadline: a request that lay as long as that is only just given up
        journal.is_away = False
        assert [row["ticket"] for row in client.call("lease", **wanted).args["grants"]] == [1]
        status = client.call("status").args
        assert status["leases"] == {"a": 1}
        assert status["counters"]["leases_given_up"] == 2
        assert status["residue"] == 0
        client.close()


def test_a_lease_granted_as_the_journal_went_away_is_taken_back_when_its_caller_gives_up(
    store: ExperienceStore, journal: FarJournal
) -> None:
    store.ledger.describe_data(100, "digest")
    clock = ManualClock()
    handler = RequestHandler(store, clock)
    journal.is_away = True
    request = lease_request()
    handler.handle(request)
    handler.end_turn()
    clock.advance(5.9)
    handler.end_turn()
    assert handler.status().leases == {"a": 2}, "its caller still waits"
    clock.advance(0.2)
    journal.is_away = False
    handler.end_turn()
    assert request.is_answered
    assert not any(handler.status().leases.values())
    assert (handler.status().reissues, handler.status().residue) == ({"released": 2}, 0)


def test_a_lease_that_was_parked_when_the_journal_went_away_is_not_granted_to_one_who_gave_up(
    store: ExperienceStore, journal: FarJournal
) -> None:
    store.ledger.describe_data(100, "digest")
    clock = ManualClock()
    handler = RequestHandler(store, clock)
    grants = store.ledger.lease("b", 1, 100, 0.0)
    request = lease_request()
    handler.handle(request)  # parked: the other replica holds all that may be leased
    handler.end_turn()
    assert not request.is_answered
    journal.is_away = True
    handler.end_turn()
    store.ledger.release("b", [(grant.ticket, grant.attempt) for grant in grants])
    clock.advance(6.1)
    journal.is_away = False
    handler.end_turn()  # it is back
    handler.end_turn()
    assert request.is_answered
    assert not any(handler.status().leases.values())


def test_a_caller_that_does_not_say_how_long_it_waits_is_served(store: ExperienceStore) -> None:
    store.ledger.describe_data(100, "digest")
    handler = RequestHandler(store, ManualClock())
    handler.handle(lease_request(within_s=math.inf))
    handler.end_turn()
    assert handler.status().leases == {"a": 2}
