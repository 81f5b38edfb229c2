"""Tickets with agents' sessions: they are their replica's until their lease would have ended."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import Grant
from asyncrl.core.config.tree import Config
from tests.buffer.ledger.parts.ledger_runs import SETTINGS
from tests.buffer.rules.test_placement import REQUIRED

LEASE_S = SETTINGS.lease_s


class Desk:
    """A ledger whose clock stands at `now`, and two replicas."""

    def __init__(self, *, keeps_sessions: bool = True) -> None:
        self.ledger, self.now = Ledger(replace(SETTINGS, keeps_sessions=keeps_sessions)), 100.0
        self.ledger.describe_data(200, "digest", [])
        self.version = self.ledger.register_version(self.ledger.open("learner"), 0)

    def lease(self, replica: str) -> Grant:
        (grant,) = self.ledger.lease(replica, self.version, 1, self.now)
        return grant

    def begin(self, replica: str) -> Grant:
        """Lease a ticket and record a turn of its sessions."""
        grant = self.lease(replica)
        key = grant.ticket, grant.attempt
        assert self.ledger.store_turns(replica, *key, 1, 50, (self.version, self.version)) == "stored"
        return grant


def test_a_replica_that_is_back_gets_its_sessions_which_others_were_not_given():
    desk = Desk()
    begun = desk.begin("a")
    desk.ledger.deregister("a")
    other = desk.lease("b")
    assert other.ticket != begun.ticket
    again = desk.lease("a")
    assert (again.ticket, again.attempt, again.partial_attempt) == (begun.ticket, 2, 1)


def test_a_drained_replica_s_sessions_are_kept_too():
    desk = Desk()
    begun = desk.begin("a")
    desk.ledger.release("a", [(begun.ticket, 1)])
    assert desk.lease("b").ticket != begun.ticket
    assert desk.lease("a").partial_attempt == 1


def test_one_that_is_not_back_in_time_loses_them_and_another_begins_anew():
    desk = Desk()
    begun = desk.begin("a")
    desk.ledger.deregister("a")
    desk.now += LEASE_S
    found = desk.lease("b")
    assert (found.ticket, found.partial_attempt) == (begun.ticket, 0)
    assert desk.ledger.state.tickets[begun.ticket].partial is None


def test_one_that_is_back_late_and_first_has_them_still():
    desk = Desk()
    begun = desk.begin("a")
    desk.now += LEASE_S
    assert desk.ledger.expire(desk.now) == 1
    found = desk.lease("a")
    assert (found.ticket, found.partial_attempt) == (begun.ticket, 1)


def test_a_group_that_failed_begins_anew_wherever():
    desk = Desk()
    begun = desk.begin("a")
    assert desk.ledger.fail("a", begun.ticket, 1)
    found = desk.lease("a")
    assert (found.ticket, found.partial_attempt) == (begun.ticket, 0)


def test_work_that_any_replica_can_go_on_with_goes_to_the_first():
    desk = Desk(keeps_sessions=False)
    begun = desk.begin("a")
    desk.ledger.deregister("a")
    found = desk.lease("b")
    assert (found.ticket, found.partial_attempt) == (begun.ticket, 1)


def test_a_ledger_that_came_back_knows_no_homes_and_sessions_begin_anew():
    desk = Desk()
    begun = desk.begin("a")
    desk.ledger.deregister("a")
    desk.ledger._begin()
    found = desk.lease("b")
    assert (found.ticket, found.partial_attempt) == (begun.ticket, 0)


def test_sessions_are_kept_where_agents_have_recorded_ones():
    def keeps(**rollout: object) -> bool:
        return ledger_settings(Config.model_validate({**REQUIRED, "rollout": rollout})).keeps_sessions

    assert keeps(gateway={}, resume_partial=True)
    assert not keeps(resume_partial=True) and not keeps(gateway={})
