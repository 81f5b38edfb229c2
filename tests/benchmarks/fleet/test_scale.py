"""The fleets of the scale benchmark, small, and its verdict."""

from __future__ import annotations

import contextlib
import cProfile
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from benchmarks.fleet.parts import sockets
from benchmarks.fleet.parts.control import ControlFleet
from benchmarks.fleet.parts.ledger import GROUP_SIZE, Fleet
from benchmarks.fleet.parts.sync import SyncFleet
from benchmarks.fleet.scale import (
    MAX_GROWTH,
    PER_MEMBER,
    check,
    growth,
    make_rows,
    read_arguments,
    table,
)


@pytest.mark.parametrize("load", [0.5, 2.0], ids=["learner waits", "replicas wait"])
def test_a_fleet_in_virtual_time_trains_and_loses_nothing(load: float) -> None:
    fleet = Fleet(4, load)
    cost = fleet.run(8 * 16 * GROUP_SIZE)
    assert cost.trajectories >= 8 * 16 * GROUP_SIZE
    assert cost.virtual_s > 0
    assert cost.us_per_trajectory > 0
    assert fleet.residue == 0


def test_replicas_wait_for_leases_where_the_learner_is_the_slower_side() -> None:
    waiting = {}
    for load in (0.5, 2.0):
        fleet = Fleet(32, load)
        fleet.run(8 * 32 * GROUP_SIZE)
        waiting[load] = fleet.num_waiting
    assert waiting[0.5] < waiting[2.0]


@pytest.fixture
def sync_fleet() -> Iterator[Callable[[int], SyncFleet]]:
    with contextlib.ExitStack() as opened:

        def make(count: int) -> SyncFleet:
            fleet = SyncFleet(count)
            opened.callback(fleet.close)
            return fleet

        yield make


def test_every_member_of_a_sync_fleet_is_brought_to_every_version(
    sync_fleet: Callable[[int], SyncFleet],
) -> None:
    fleet = sync_fleet(5)
    assert fleet.sync(3) > 0  # raises where a member was left behind
    assert fleet.beat(2) > 0


def count_calls(act: Callable[[], object]) -> int:
    """Return how many calls of functions `act` makes."""
    profile = cProfile.Profile()
    profile.runcall(act)
    return sum(one.callcount for one in profile.getstats())


@pytest.mark.long
def test_a_version_and_a_heartbeat_take_as_many_calls_of_a_member_in_a_large_fleet_as_in_a_small_one(
    sync_fleet: Callable[[int], SyncFleet],
) -> None:
    calls = {}
    for count in (8, 512):
        fleet = sync_fleet(count)
        fleet.sync(1)
        calls[count] = [count_calls(partial(act, 1)) / count for act in (fleet.sync, fleet.beat)]
    assert all(large <= MAX_GROWTH * small for small, large in zip(calls[8], calls[512], strict=True)), calls


def test_a_supervisor_of_made_up_services_goes_through_pulses_and_losses() -> None:
    fleet = ControlFleet(8, 3, 2)
    fleet.run()
    assert [len(one) for one in (fleet.pulse_s, fleet.view_s, fleet.loss_s)] == [3, 3, 2]
    assert min([*fleet.pulse_s, *fleet.view_s, *fleet.loss_s]) > 0


@pytest.mark.long
def test_pulses_and_losses_take_as_many_calls_of_a_replica_in_a_large_fleet_as_in_a_small_one() -> None:
    calls = [count_calls(ControlFleet(count, 3, 2).run) / count for count in (8, 512)]
    assert calls[1] <= MAX_GROWTH * calls[0], calls


def test_a_fleet_offers_its_rate_from_the_first_second_on() -> None:
    """Of slots whose groups take 20 s in the mean, a twentieth ends in every second, the first one too."""
    dice = random.Random(0)
    ends_s = []
    for _ in range(4000):
        at_s = sockets.draw_s(dice.random(), 20.0, is_first=True)
        while at_s < 10.0:
            ends_s.append(at_s)
            at_s += sockets.draw_s(dice.random(), 20.0, is_first=False)
    for second in range(0, 10, 2):
        assert sum(second <= end < second + 2 for end in ends_s) / 400 == pytest.approx(1.0, abs=0.15)


def test_the_processor_time_of_a_process_has_no_ticks() -> None:
    before_s = sockets.read_cpu_s(os.getpid())
    while sockets.read_cpu_s(os.getpid()) == before_s:
        pass
    assert 0 < sockets.read_cpu_s(os.getpid()) - before_s < 1.0


@pytest.mark.long
def test_a_fleet_over_sockets_is_measured_from_step_to_step() -> None:
    taken = sockets.measure(sockets.Load(4, 80.0), 0.5, 0.5, min_steps=2)
    step = sockets.GROUPS_PER_STEP * sockets.GROUP_SIZE
    assert taken.trajectories >= 2 * step
    assert taken.trajectories % step == 0
    assert 0 < taken.cpu_s <= 2 * taken.seconds
    assert taken.us_per_trajectory > 0


def test_what_sync_costs_is_judged_as_a_part_of_a_trajectory() -> None:
    """Of 16 per member and version: 10 + 1 us at 8 replicas, 11 + x at 512."""
    sockets_rows = [{"replicas": 8, "us_per_trajectory": 10.0}, {"replicas": 512, "us_per_trajectory": 11.0}]
    for us_per_member, is_met in ((16.0, True), (64.0, False)):
        small = {"replicas": 8, "us_per_member": [16.0], "us_per_heartbeat": [4.0]}
        sync = [small, small | {"replicas": 512, "us_per_member": [us_per_member]}]
        assert f"512 members, of each {us_per_member:.0f} us per version" in table(
            {"quick": True, "sync": sync}
        )
        assert check({"sockets": sockets_rows, "sync": sync})[0] == is_met
    assert check({"sockets": sockets_rows, "sync": sync[:1]})[0], "one fleet is no growth"


@pytest.mark.parametrize(("part", "name"), [(part, name) for part in PER_MEMBER for name in PER_MEMBER[part]])
def test_each_cost_of_a_member_may_grow_by_a_fifth(part: str, name: str) -> None:
    def verdict(us: float) -> bool:
        small: dict[str, Any] = {"replicas": 8, **{one: [10.0] for one in PER_MEMBER[part]}}
        return check({"quick": True, part: [small, small | {"replicas": 1024, name: [us, 99.0]}]})[0]

    assert verdict(11.9) and not verdict(12.1)


def test_the_calls_of_requests_are_counted_and_nothing_else() -> None:
    fleet, before = Fleet(8, 2.0), sys.getprofile()
    fleet.run(4 * 8 * GROUP_SIZE)
    counts = [fleet.count_calls(4 * 8 * GROUP_SIZE) for _ in range(2)]
    assert counts[0] == pytest.approx(counts[1], rel=0.3)
    assert counts[0] > 20
    assert sys.getprofile() is before


def test_parts_that_there_are_none_of_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_arguments(["--only", "sync,virtual"]).only == ("sync", "virtual")
    with pytest.raises(SystemExit):
        read_arguments(["--only", "x"])
    assert "'x' is none of live, virtual" in capsys.readouterr().err


def results(large_calls: float, residue: int = 0) -> dict[str, Any]:
    def row(replicas: int, calls: float) -> dict[str, Any]:
        return {
            "load": "learner waits",
            "replicas": replicas,
            "us_per_trajectory": 10.0,
            "tick_share": 0.0,
            "core_share": 0.1,
            "trajectories_per_s": 5.0,
            "residue": residue,
            "calls_per_trajectory": calls,
        }

    return {"quick": True, "virtual": [row(8, 10.0), row(512, large_calls), row(4096, 10.0)]}


def test_growth_compares_the_dearest_and_the_smallest_fleet() -> None:
    assert growth(results(11.5)["virtual"], "calls_per_trajectory") == pytest.approx(1.15)
    assert check(results(11.5))[0]
    assert not check(results(12.5))[0], "the largest is cheap, the middle one is not"


def test_growth_takes_the_fastest_rounds() -> None:
    rows = [{"replicas": 8, "us": [10.0, 12.0]}, {"replicas": 64, "us": [99.0, 11.0]}]
    assert growth(rows, "us") == pytest.approx(1.1)


def test_a_ticket_that_the_laws_leave_unexplained_fails_the_benchmark() -> None:
    assert not check(results(10.0, residue=1))[0]
    assert not check({"quick": True})[0]


def test_every_row_is_told_and_kept() -> None:
    assert len(table(results(11.0)).splitlines()) == 3
    rows = make_rows(results(11.0))
    assert [row.case["replicas"] for row in rows] == [8, 512, 4096]
    assert rows[1].values["calls_per_trajectory"] == 11.0
