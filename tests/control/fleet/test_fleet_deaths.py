"""Deaths that a run outlives, those that retire a replica, and those that end the run with a sentence."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.control.fleet.budget import BACK_OFFS_S, WINDOW_S
from asyncrl.control.fleet.machine import FleetRules
from asyncrl.control.fleet.messages import Begin, Cause, GiveUp, Gone, Kill, Promote, Retire, Wanted
from asyncrl.control.fleet.saved import SavedMachine, dump, restore
from asyncrl.control.fleet.units import Stage
from tests.control.fleet.fleet_world import World
from tests.control.fleet.test_fleet_machine import make_world, started

ENGINES = ("rollout.0", "rollout.1", "rollout.2")


def die_in_vain(world: World, name: str, times: int) -> None:
    """Kill `name` so often; each time it comes up, and dies before it has done anything."""
    for _ in range(times):
        world.die(name)
        world.wait(20.0)
        world.bring_up()


def spend(world: World, name: str = "rollout.1") -> Retire:
    """Kill `name` until its unit is retired, and return how."""
    die_in_vain(world, name, world.machine.rules.max_restarts)
    world.die(name)
    last = world.taken[-1]
    assert isinstance(last, Retire)
    return last


@pytest.mark.parametrize(
    "victim",
    ["buffer.0", "weight_sync.0", "learner.0", "publisher.0", "rollout.0", "receiver.0"],
)
def test_who_works_between_its_deaths_may_die_as_often_as_it_likes(victim: str) -> None:
    world = make_world(replicas=1)
    for _ in range(40):
        world.taken.clear()
        world.die(victim)
        assert victim in started(world), "at once: it worked"
        world.bring_up()
        world.work("rollout.0")
        world.wait(1.0)
    assert world.machine.given_up is None


@pytest.mark.parametrize("victim", ["buffer.0", "learner.0"])
def test_steps_that_are_trained_again_are_no_progress(victim: str) -> None:
    world = make_world(replicas=1, max_restarts=3)
    for _ in range(50):
        world.work("rollout.0")
    for _ in range(4):
        world.die(victim)
        world.done["learner.0"] = 30  # it goes on from its checkpoint
        world.wait(5.0)
        world.bring_up()
        world.work("rollout.0")
    assert world.machine.given_up is not None
    assert "no step was trained in between" in world.machine.given_up.reason


def test_a_replica_is_judged_by_its_own_answers_not_by_the_steps_of_others() -> None:
    world = make_world()
    for _ in range(5):
        world.die("rollout.1")
        world.wait(20.0)
        world.bring_up()
        world.work("rollout.0")
    world.die("rollout.1")
    assert isinstance(world.taken[-1], Retire)


def test_a_spent_budget_retires_the_replica_and_the_run_goes_on() -> None:
    world = make_world()
    retired = spend(world)
    assert retired == Retire(
        "rollout.1",
        "rollout.1 was killed; it was restarted 5 times already, and finished no answer in between; it is "
        "started again in 120 s, or by 'asyncrl scale rollout=2'; the run goes on with 1 of 2 replicas",
        120.0,
    )
    assert world.machine.given_up is None and world.machine.is_degraded
    assert world.machine.stages()["replica.1"] is Stage.RETIRED
    world.taken.clear()
    world.wait(119.0)
    assert world.taken == [], "nobody else is started for it"
    world.wait(1.5)
    assert started(world) == ["rollout.1", "receiver.1"]
    world.bring_up()
    assert not world.machine.is_degraded


def test_a_receiver_whose_restarts_are_spent_takes_its_engine_with_it() -> None:
    world = make_world()
    retired = spend(world, "receiver.1")
    assert (retired.service, retired.reason.split(";")[0]) == ("rollout.1", "receiver.1 was killed")
    assert world.running & {"rollout.1", "receiver.1"} == set()


def test_a_receiver_that_is_replaced_with_its_engine_does_not_count() -> None:
    world = make_world()
    for _ in range(5):
        world.taken.clear()
        die_in_vain(world, "rollout.1", 1)
        assert started(world) == ["rollout.1", "receiver.1"]
    assert world.machine.units["replica.1"].num_restarts == 5
    assert len(world.machine.units["replica.1"].budget.times) == 5


def test_back_offs_grow_until_the_replica_works_again() -> None:
    world = make_world()
    for back_off_s in (*BACK_OFFS_S, BACK_OFFS_S[-1]):
        assert spend(world).back_in_s == back_off_s
        world.wait(back_off_s + 1.0)
        world.bring_up()
    world.work("rollout.1")
    assert spend(world).back_in_s == BACK_OFFS_S[0]


def test_scaling_brings_a_retired_replica_back_at_once_and_lets_it_go_first() -> None:
    world = make_world(replicas=3)
    spend(world, "rollout.0")
    world.taken.clear()
    world.tell(Wanted(3))
    assert started(world) == ["rollout.0", "receiver.0"]
    world.bring_up()
    assert spend(world, "rollout.0").back_in_s == BACK_OFFS_S[0], "it began anew"
    world.die("rollout.2")  # it is the newest, and does not work either
    world.taken.clear()
    world.tell(Wanted(2))
    assert world.taken == []
    assert [unit.index for unit in world.machine.replicas] == [1, 2]


def test_a_spare_takes_the_place_of_a_retired_replica() -> None:
    world = make_world(replicas=1, standby=1)
    die_in_vain(world, "receiver.0", 5)
    world.taken.clear()
    world.die("receiver.0")
    assert world.taken[:3] == [Kill("rollout.0"), Kill("receiver.0"), Promote(1)]
    assert isinstance(world.taken[3], Retire)
    assert "the run goes on with 1 of 1 replicas" in world.taken[3].reason
    assert [unit.index for unit in world.machine.standbys] == [0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_when_all_are_retired_the_run_waits_one_back_off_and_then_ends_with_the_reason(replicas: int) -> None:
    world = make_world(replicas=replicas)
    names = ENGINES[:replicas]
    for name in names:
        last = spend(world, name)
    assert last.reason.endswith("; no replica works now")
    world.wait(BACK_OFFS_S[0] + 1.0)
    world.bring_up()
    for name in names[:-1]:
        spend(world, name)
    die_in_vain(world, names[-1], 5)
    assert world.machine.given_up is None
    world.die(names[-1], "failed: out of memory")
    why = "failed: out of memory; it was restarted 5 times already, and finished no answer in between"
    assert world.taken[-1] == GiveUp(names[-1], f"{names[-1]} {why}")


def test_while_another_replica_is_up_and_has_not_had_its_chance_the_run_goes_on() -> None:
    world = make_world()
    for back_off_s in BACK_OFFS_S[:2]:
        spend(world, "rollout.0")
        world.wait(back_off_s + 1.0)
        world.bring_up()
    spend(world, "rollout.1")
    world.wait(BACK_OFFS_S[0] + 1.0)
    world.bring_up()
    assert spend(world, "rollout.1").back_in_s == BACK_OFFS_S[1]
    assert world.machine.given_up is None


def test_replicas_that_never_came_up_end_the_run_without_a_back_off() -> None:
    world = World(FleetRules())
    world.tell(Begin(1))
    world.bring_up("buffer.0", "weight_sync.0", "learner.0", "publisher.0")
    for _ in range(6):
        assert world.machine.given_up is None
        world.die("rollout.0")
        world.wait(20.0)
    assert isinstance(world.taken[-1], GiveUp)


def test_the_state_that_a_release_without_retirement_saved_is_read() -> None:
    world = make_world()
    saved = dump(world.machine)
    older = msgspec.to_builtins(saved)
    for unit in older["units"]:
        del unit["num_spent"], unit["is_retired"]
    assert older != msgspec.to_builtins(saved)
    assert dump(restore(world.machine.rules, msgspec.convert(older, SavedMachine), world.now)) == saved


def test_a_new_supervisor_knows_who_is_retired_and_for_how_long() -> None:
    world = make_world()
    spend(world)
    world.wait(20.0)
    world.machine = restore(world.machine.rules, dump(world.machine), world.now)
    assert world.machine.stages()["replica.1"] is Stage.RETIRED
    world.taken.clear()
    world.wait(99.0)
    assert started(world) == []
    world.wait(2.0)
    assert started(world) == ["rollout.1", "receiver.1"]
    world.bring_up()
    assert spend(world).back_in_s == BACK_OFFS_S[1]


def test_without_restarts_the_first_death_of_a_replica_ends_the_run() -> None:
    world = make_world(max_restarts=0)
    world.die("rollout.1")
    assert world.taken[-1] == GiveUp("rollout.1", "rollout.1 was killed")


def test_a_unit_without_work_to_do_is_forgiven_after_the_window() -> None:
    world = make_world()  # nothing is trained, as in a paused run
    for _ in range(20):
        die_in_vain(world, "buffer.0", 1)
        world.wait(WINDOW_S / 4)
    assert world.machine.given_up is None


VICTIMS = ("rollout.1", "receiver.1", "rollout.2", "receiver.2", "receiver.0")
DEATHS = st.lists(
    st.tuples(
        st.sampled_from(VICTIMS),
        st.sampled_from([Cause.DEATH, Cause.DEATH, Cause.ERROR]),
        st.sampled_from([0.0, 0.25, 2.0, 40.0]),
        st.booleans(),
    ),
    min_size=10,
    max_size=30,
)


@settings(max_examples=15, deadline=None)
@given(deaths=DEATHS, standby=st.integers(0, 1), max_restarts=st.integers(1, 5))
def test_while_a_replica_works_no_death_of_replicas_and_receivers_ends_the_run(
    deaths: list[tuple[str, Cause, float, bool]], standby: int, max_restarts: int
) -> None:
    world = make_world(replicas=3, standby=standby, max_restarts=max_restarts)
    for victim, cause, seconds, is_up in deaths:
        if victim in world.running:
            world.tell(Gone(victim, "was hit", cause))
        if is_up:
            world.bring_up()
        world.bring_up("receiver.0")
        world.work("rollout.0")
        world.wait(seconds)
        world.machine = restore(world.machine.rules, dump(world.machine), world.now)
    assert world.machine.given_up is None
    end = world.now + BACK_OFFS_S[-1] + 60.0
    while world.machine.is_degraded and world.now < end:
        world.wait(10.0)
        world.bring_up()
    assert set(world.machine.stages().values()) == {Stage.READY}
