"""Placement of groups by prefixes: what a call is given, and what it must not change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import Grant, State
from asyncrl.buffer.rules.placement import WINDOW, Placed, Placement
from asyncrl.control.rows.metering import Meter
from asyncrl.core.config.tree import Config
from tests.buffer.ledger.parts.ledger_runs import GROUP_BYTES, SETTINGS
from tests.statuses import statuses_of

SOURCES = [(50, 1.0)] * 4
REQUIRED = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}


class Fleet:
    """A ledger of several sources, and its learner."""

    def __init__(
        self, *, shares_prefixes: bool = True, max_lag: int = 1, groups: int = 32, first: float = 1.0
    ) -> None:
        settings = replace(SETTINGS, groups_per_step=groups, max_lag=max_lag, memory_bytes=1 << 30)
        self.ledger = Ledger(replace(settings, shares_prefixes=shares_prefixes))
        self.ledger.describe_data(200, "digest", [(50, first), *SOURCES[1:]])
        self.token = self.ledger.open("learner")
        self.version = self.ledger.register_version(self.token, 0)

    def lease(self, replica: str, want: int = 1, now: float = 0.0, version: int | None = None) -> list[Grant]:
        return self.ledger.lease(replica, version or self.version, want, now)

    def store(self, grant: Grant) -> None:
        self.ledger.store(grant.ticket, 10, GROUP_BYTES, (self.version, self.version))


def test_a_replica_is_given_what_its_cache_has_then_what_nobody_has_then_the_oldest():
    prefixes = Placement(10.0)
    for source in (0, 1):
        prefixes.note("b", 1, source)
    prefixes.note("a", 1, 2)
    assert prefixes.choose("a", 1, [0, 3, 2]) == (2, Placed.HIT)
    assert prefixes.choose("a", 1, [0, 3, 1]) == (1, Placed.NEW)
    assert prefixes.choose("a", 1, [1, 0]) == (0, Placed.COPY)
    assert prefixes.choose("a", 2, [0, 2]) == (0, Placed.NEW), "a new version has cleared all caches"
    prefixes.note("b", 2, 0)
    assert prefixes.choose("a", 1, [1, 2]) == (0, Placed.ORDER), "an older version's cache is of no use"
    assert prefixes.choose("a", 2, [1, 2]) == (0, Placed.NEW), "nor what it had then"
    prefixes.forget("b")
    assert prefixes.choose("a", 2, [0, 3]) == (0, Placed.NEW), "its cache has gone with it"


def test_a_replica_that_asks_again_and_again_is_given_one_source_and_leaves_the_others_to_others():
    fleet = Fleet()
    sources = {name: [fleet.lease(name)[0].source for _ in range(3)] for name in "abcd"}
    assert all(len(set(found)) == 1 for found in sources.values()), sources
    assert len({found[0] for found in sources.values()}) == 4
    assert fleet.ledger.placement.counts == {Placed.NEW: 4, Placed.HIT: 8}


def test_a_ticket_is_passed_over_by_fewer_than_the_window():
    fleet = Fleet(groups=64, first=60.0)
    order = [fleet.lease("a")[0].ticket for _ in range(100)]
    assert order != sorted(order), "nothing was passed over: this test shows nothing"
    for place, ticket in enumerate(order):
        assert sum(younger > ticket for younger in order[:place]) < WINDOW


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_a_call_is_given_its_share_of_a_step_and_those_that_are_silent_have_none(shares_prefixes: bool):
    fleet = Fleet(shares_prefixes=shares_prefixes, groups=8)
    for name in "abc":
        fleet.lease(name)
    assert len(fleet.lease("d", 8)) == (2 if shares_prefixes else 8)
    if shares_prefixes:
        fleet.ledger.renew("a", [], 9.0)
        assert len(fleet.lease("d", 8, 11.0)) == 4, "a has renewed and d asks; b and c are gone"
        fleet.ledger.deregister("a")
        assert len(fleet.lease("d", 8, 11.0)) == 8, "a step, alone"


def test_a_ticket_that_was_issued_ahead_has_the_position_of_its_lease():
    fleet = Fleet(groups=4)
    for grant in (*fleet.lease("a", 4), *fleet.lease("a", 2))[:4]:
        fleet.store(grant)
    assert fleet.ledger.reserve(fleet.token, 0, 0.0)
    fleet.ledger.trained(fleet.token, 0, [])
    assert len(fleet.lease("a", 4)) == 2, "two places of the last step that this version may generate"
    assert fleet.lease("a", 4) == [], "rule (b)"


def test_a_synchronous_step_trains_the_same_groups_with_the_same_seeds_whoever_generates_them():
    trained = []
    for shares_prefixes in (False, True):
        fleet, dice, steps = Fleet(shares_prefixes=shares_prefixes, max_lag=0), random.Random(1), []
        for step in range(4):
            held: list[Grant] = []
            while granted := fleet.lease(dice.choice("abc"), dice.randrange(1, 9)):
                held += granted
            dice.shuffle(held)
            for grant in held:
                fleet.store(grant)
            batch = fleet.ledger.reserve(fleet.token, step, 0.0)
            assert batch is not None
            seeds = {grant.ticket: grant.seed for grant in held}
            steps.append([(one.id, one.source, one.index, seeds[one.id]) for one in batch])
            fleet.ledger.trained(fleet.token, step, [])
            fleet.version = fleet.ledger.register_version(fleet.token, step + 1)
        trained.append(steps)
    assert trained[0] == trained[1]


def test_tickets_that_were_issued_ahead_wait_while_a_batch_is_complete():
    fleet = Fleet(groups=8)
    for _ in range(8):
        (grant,) = fleet.lease("a")
        fleet.store(grant)
    assert fleet.ledger.state.counts[State.ISSUED] > 0, "none was issued ahead: this test shows nothing"
    assert fleet.lease("a") == [], "rule (c)"


def test_a_ticket_that_was_issued_ahead_is_not_leased_for_a_version_that_is_too_old_for_its_turn():
    fleet = Fleet(groups=2, max_lag=0)
    held = fleet.lease("a", 2)
    for grant in held:
        fleet.store(grant)
    fleet.ledger.reserve(fleet.token, 0, 0.0)
    fleet.ledger.trained(fleet.token, 0, [])
    assert fleet.lease("a") == [], "the replica serves the version before"
    fleet.version = fleet.ledger.register_version(fleet.token, 1)
    assert fleet.lease("a")


@pytest.mark.parametrize("seed", range(10))
def test_who_is_passed_over_still_trains_first_and_nobody_comes_too_late_behind_it(seed: int):
    dice = random.Random(seed)
    fleet = Fleet(groups=dice.choice((4, 8, 16)), max_lag=dice.choice((1, 2)), first=dice.choice((1.0, 9.0)))
    state, held, num_passed = fleet.ledger.state, [], 0
    settings = fleet.ledger.settings
    for _ in range(300):
        version = max(1, fleet.version - dice.randrange(3))
        granted = fleet.lease(dice.choice("abc"), dice.randrange(1, 5), 0.0, version)
        for grant in granted:
            older = [one for one in (*state.leased(), *map(state.tickets.get, state.stored)) if one]
            older += [state.tickets[number] for number in state.issued_heap]
            num_older = sum(one.id < grant.ticket for one in older)
            num_passed += min(state.issued_heap, default=grant.ticket) < grant.ticket
            turn = state.steps_trained + num_older // settings.groups_per_step
            assert turn - state.versions.counted_step(version) <= settings.max_lag
        held += granted
        while held and dice.random() < 0.5:
            fleet.store(held.pop(dice.randrange(len(held))))
        if fleet.ledger.reserve(fleet.token, step := state.steps_trained, 0.0):
            fleet.ledger.trained(fleet.token, step, [])
            fleet.version = fleet.ledger.register_version(fleet.token, step + 1)
    assert num_passed > 20, "nothing was passed over: this test shows nothing"


def test_the_reasons_of_the_ledger_are_metrics():
    buffer = {"counters": {"placed/hit": 3, "placed/new": 1, "leases_given_up": 2}}
    row = Meter().update(0.0, statuses_of({"buffer.0": buffer}))
    found = {name: value for name, value in row.items() if name.startswith("buffer/placed/")}
    assert found == {"buffer/placed/hit": 3.0, "buffer/placed/new": 1.0}


@pytest.mark.parametrize(("max_lag", "expected"), [(0, False), (1, True)])
def test_groups_are_placed_where_prefixes_are_shared(max_lag: int, expected: bool):
    config = Config.model_validate({**REQUIRED, "staleness": {"max_lag": max_lag}})
    assert ledger_settings(config).shares_prefixes is expected
