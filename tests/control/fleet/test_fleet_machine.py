"""Decisions of the fleet machine, and the rules that hold however its services fail."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.control.fleet.budget import BACK_OFFS_S, DELAYS_S, WINDOW_S, Budget
from asyncrl.control.fleet.machine import FleetRules
from asyncrl.control.fleet.messages import (
    Begin,
    Cause,
    Drain,
    Finish,
    Forgo,
    GiveUp,
    Gone,
    Heard,
    Kill,
    Leave,
    Promote,
    Start,
    Wanted,
)
from asyncrl.control.fleet.saved import dump, restore
from asyncrl.control.fleet.units import Stage
from tests.control.fleet.fleet_world import World


def make_world(replicas: int = 2, standby: int = 0, **rules: object) -> World:
    """Return a run of which everything is up."""
    world = World(FleetRules(**rules))  # type: ignore[arg-type]
    world.tell(Begin(replicas, standby))
    world.bring_up()
    return world


def started(world: World) -> list[str]:
    return [effect.name for effect in world.taken if isinstance(effect, Start)]


def test_a_run_begins_with_replicas_first_and_every_service_once() -> None:
    world = make_world(replicas=2, num_ranks=2, num_publishers=2)
    assert started(world)[:4] == ["rollout.0", "receiver.0", "rollout.1", "receiver.1"]
    assert started(world)[4:] == [
        "buffer.0", "weight_sync.0", "learner.0", "learner.1", "publisher.0", "publisher.1",
    ]  # fmt: skip
    assert not world.machine.is_degraded


@pytest.mark.parametrize(
    ("victim", "renewed"),
    [
        ("buffer.0", ["buffer.0"]),
        ("weight_sync.0", ["weight_sync.0"]),
        ("publisher.0", ["publisher.0"]),
        ("publisher.1", ["publisher.1"]),
        ("learner.1", ["learner.0", "learner.1"]),
        ("receiver.1", ["receiver.1"]),
        ("rollout.1", ["rollout.1", "receiver.1"]),
    ],
)
def test_who_dies_is_started_anew_with_its_unit_and_nobody_else(victim: str, renewed: list[str]) -> None:
    world = make_world(num_ranks=2, num_publishers=2)
    world.taken.clear()
    world.die(victim)
    assert [effect.name for effect in world.taken if isinstance(effect, Kill)] == renewed
    assert started(world) == renewed
    assert world.machine.is_degraded
    world.bring_up()
    assert not world.machine.is_degraded


def test_restarts_come_ever_later_and_one_too_many_is_the_end_with_its_reason() -> None:
    world = make_world(max_restarts=3)
    for delay_s in DELAYS_S[:3]:
        world.taken.clear()
        world.die("buffer.0", "failed: disk full")
        world.wait(delay_s - 0.5) if delay_s else None
        assert started(world) == ([] if delay_s else ["buffer.0"])
        world.wait(0.6)
        assert started(world) == ["buffer.0"]
        world.bring_up()
    world.die("buffer.0", "failed: disk full")
    last = world.taken[-1]
    assert isinstance(last, GiveUp) and last.service == "buffer.0"
    assert last.reason == (
        "buffer.0 failed: disk full; it was restarted 3 times already, and no step was trained in between"
    )
    world.die("learner.0")
    world.tell(Wanted(5))
    assert world.taken[-1] is last, "nothing is begun any more"


def test_a_unit_that_came_up_is_forgiven_its_old_restarts_and_one_that_never_does_is_not() -> None:
    budget = Budget(2)
    assert budget.ask(0.0) == 0.0
    assert budget.ask(1.0) == 1.0
    assert budget.ask(2.0 + WINDOW_S) is None, "it has not come up since"
    budget.note_up(7)
    assert budget.ask(3.0 + WINDOW_S) == 0.0


def test_an_error_that_no_restart_cures_ends_the_run_at_once() -> None:
    world = make_world()
    world.taken.clear()
    world.tell(Gone("rollout.0", "failed: ConfigError: no such reward", Cause.FINAL))
    assert world.taken == [GiveUp("rollout.0", "rollout.0 failed: ConfigError: no such reward")]


def test_the_same_error_twice_before_it_ever_worked_ends_the_run_but_deaths_do_not() -> None:
    world = World(FleetRules())
    world.tell(Begin(1))
    for _ in range(2):
        world.die("learner.0", "was killed")
        world.wait(1.5)
    assert world.machine.given_up is None
    for _ in range(2):
        world.tell(Gone("learner.0", "failed: no tokenizer", Cause.ERROR))
        world.wait(3.0)
    assert world.machine.given_up is not None
    assert "never worked" in world.machine.given_up.reason


def test_a_buffer_that_remembers_nothing_is_not_restarted() -> None:
    world = make_world(never_again={"buffer": "nothing remembers what it held"})
    world.die("buffer.0")
    assert world.machine.given_up is not None
    assert world.machine.given_up.reason.endswith("; nothing remembers what it held")


def test_who_was_stopped_is_suspected_then_killed_and_replaced() -> None:
    world = make_world()
    world.halted.add("rollout.0")
    world.wait(6.0)
    assert world.machine.stages()["replica.0"] is Stage.SUSPECT
    world.taken.clear()
    world.wait(5.0)
    assert world.taken[0] == Kill("rollout.0")
    assert started(world) == ["rollout.0", "receiver.0"]


def test_a_stopped_replica_has_half_the_time_of_a_learner_with_which_steps_would_be_lost() -> None:
    world = make_world()
    world.halted |= {"learner.0", "receiver.0"}
    world.taken.clear()
    world.wait(9.75)
    assert world.taken == []
    world.wait(9.75)
    assert world.taken == [Kill("receiver.0"), Start("receiver.0")]
    world.wait(1.0)
    assert world.taken[2:] == [Kill("learner.0"), Start("learner.0")]


def test_who_is_thawed_in_time_goes_on() -> None:
    world = make_world()
    world.halted |= {"learner.0", "rollout.0"}
    world.taken.clear()
    world.wait(9.5)
    world.halted.remove("rollout.0")
    world.wait(9.5)
    world.halted.clear()
    world.wait(1.0)
    world.silent.add("rollout.0")
    world.wait(30.0)
    assert world.taken == []


def test_who_runs_and_does_not_answer_gets_longer() -> None:
    world = make_world()
    world.silent.add("learner.0")
    world.taken.clear()
    world.wait(59.0)
    assert world.taken == []
    world.wait(3.0)
    assert world.taken == [Kill("learner.0"), Start("learner.0")]


def test_who_still_starts_may_be_silent_unless_it_was_stopped() -> None:
    world = make_world()
    world.die("rollout.0")
    world.silent.add("rollout.0")
    world.taken.clear()
    world.wait(290.0)
    assert world.taken == []
    world.wait(11.0)
    assert world.taken[0] == Kill("rollout.0")
    world.wait(2.0)
    world.halted.add("rollout.0")
    world.taken.clear()
    world.wait(22.0)
    assert world.taken[0] == Kill("rollout.0")


def test_time_in_which_the_whole_machine_stood_still_is_held_against_nobody() -> None:
    world = make_world()
    world.taken.clear()
    world.silent |= world.running  # nobody has come to answer yet
    world.now += 3600.0
    world.wait(0.25)
    assert world.taken == []
    world.silent.clear()
    world.wait(0.25)
    assert not world.machine.is_degraded


def test_a_replica_that_never_gets_on_is_replaced_once_and_then_named() -> None:
    world = World(FleetRules(start_deadline_s=30.0))
    world.tell(Begin(1))
    world.bring_up("buffer.0", "weight_sync.0", "publisher.0", "learner.0")
    for _ in range(2):
        world.states["rollout.0"] = world.states["receiver.0"] = "SYNCING"
        world.wait(32.0)
    assert started(world).count("rollout.0") == 2
    assert world.machine.given_up is not None
    assert "rollout.0 was still SYNCING after 30 s" in world.machine.given_up.reason


def test_syncing_is_not_held_against_a_replica_while_there_are_no_weights_to_be_had() -> None:
    world = World(FleetRules(start_deadline_s=30.0))
    world.tell(Begin(1))
    world.bring_up("buffer.0", "weight_sync.0", "publisher.0")
    world.states["rollout.0"] = world.states["receiver.0"] = "SYNCING"
    for _ in range(5):
        world.die("learner.0")
        world.wait(20.0)
        assert world.machine.given_up is None
    assert started(world).count("rollout.0") == 1


def test_a_learner_whose_checkpoint_is_on_its_way_to_other_nodes_has_as_long_as_it_says() -> None:
    world = World(FleetRules(num_ranks=2, start_deadline_s=30.0))
    world.tell(Begin(0))
    world.bring_up("buffer.0", "weight_sync.0", "publisher.0")
    world.states["learner.0"] = world.states["learner.1"] = "SYNCING"
    world.wait(100.0)
    assert started(world).count("learner.0") == 1
    world.states["learner.0"] = world.states["learner.1"] = "STARTING"
    world.wait(29.0)
    assert started(world).count("learner.0") == 1, "the load begins to count when the files are there"
    world.wait(3.0)
    assert started(world).count("learner.0") == 2


def test_scaling_ends_the_newest_by_draining_and_takes_up_their_indices_later() -> None:
    world = make_world(replicas=3)
    world.taken.clear()
    world.tell(Wanted(1))
    assert world.taken == [Drain(2), Drain(1)]
    world.taken.clear()
    world.tell(Wanted(2))
    assert started(world) == ["rollout.3", "receiver.3"], "1 and 2 are still there"
    world.finish_drain(1)
    world.taken.clear()
    world.tell(Wanted(3))
    assert started(world) == ["rollout.1", "receiver.1"]


def test_no_replicas_at_all_are_allowed() -> None:
    world = make_world(replicas=2)
    world.tell(Wanted(0))
    for index in (0, 1):
        world.finish_drain(index)
    assert not any(name.startswith("rollout.") for name in world.machine.names)
    world.taken.clear()
    world.tell(Wanted(1))
    assert started(world) == ["rollout.0", "receiver.0"]


def test_a_leaver_that_hangs_or_dies_is_ended_and_not_replaced() -> None:
    for way in ("hang", "die"):
        world = make_world(replicas=2, start_deadline_s=30.0)
        world.tell(Wanted(1))
        world.taken.clear()
        if way == "die":
            world.die("rollout.1")
        else:
            world.wait(31.0)
        assert world.taken == [Kill("rollout.1"), Kill("receiver.1")]


def test_a_drained_replica_is_replaced_as_long_as_its_number_is_wanted() -> None:
    world = make_world(replicas=2)
    world.taken.clear()
    world.tell(Leave(0))
    assert world.taken == [Drain(0), Start("rollout.2"), Start("receiver.2")]


def test_one_that_stands_by_takes_the_place_of_a_dead_one_which_then_stands_by() -> None:
    world = make_world(replicas=1, standby=1)
    assert world.machine.standbys[0].index == 1
    world.taken.clear()
    world.die("rollout.0")
    assert world.taken == [
        Kill("rollout.0"),
        Kill("receiver.0"),
        Promote(1),
        Start("rollout.0", is_standby=True),
        Start("receiver.0", is_standby=True),
    ]
    assert [unit.index for unit in world.machine.replicas] == [1]
    world.die("receiver.1")
    assert [unit.index for unit in world.machine.replicas] == [1], "its engine lives"


def test_scaling_up_takes_who_stands_by_first() -> None:
    world = make_world(replicas=1, standby=1)
    world.taken.clear()
    world.tell(Wanted(2))
    assert world.taken == [Promote(1), Start("rollout.2", True), Start("receiver.2", True)]


def test_a_learner_that_is_done_is_left_alone() -> None:
    world = make_world()
    world.states["learner.0"] = "ENDED"
    world.wait(1.0)
    world.taken.clear()
    world.die("learner.0")
    assert world.taken == []
    assert world.machine.stages()["learner"] is Stage.DONE
    world.die("rollout.0")
    assert started(world) == ["rollout.0", "receiver.0"]


def test_a_learner_that_was_asked_to_end_is_not_started_again_and_its_peers_are() -> None:
    for is_due in (False, True):
        world = make_world(num_ranks=2)
        for _ in range(2 if is_due else 0):  # the second time it is to be started a second later
            world.die("learner.0")
        world.tell(Finish())
        world.machine = restore(world.machine.rules, dump(world.machine), world.now)
        world.taken.clear()
        world.die("learner.1")
        world.silent.add("learner.0")
        world.wait(70.0)
        assert world.taken == []
        world.die("buffer.0")
        assert started(world) == ["buffer.0"]


def test_the_same_error_without_a_step_further_is_the_end_at_the_third_time() -> None:
    world = make_world()
    for step in (5, 5, 6, 6):  # it gets past the first batch that it fails at, and not past the second
        world.tell(Heard("learner.0", "READY", step))
        world.tell(Gone("learner.0", "failed: CUDA out of memory", Cause.ERROR))
        world.machine = restore(world.machine.rules, dump(world.machine), world.now)
        world.wait(5.0)
        world.bring_up()
        world.wait(WINDOW_S)
    assert world.machine.given_up is None
    world.tell(Heard("learner.0", "READY", 6))
    world.tell(Gone("learner.0", "failed: CUDA out of memory", Cause.ERROR))
    assert world.machine.given_up is not None
    assert world.machine.given_up.reason.endswith("; it did so 3 times and came no further than step 6")


def test_a_replica_that_never_starts_beside_others_that_work_is_forgone() -> None:
    world = make_world(replicas=2, standby=1)
    for want, name in ((Wanted(4), "rollout.4"), (Wanted(standby=2), "rollout.5")):
        world.tell(want)
        world.bring_up("rollout.3", "receiver.3")
        for _ in range(2):
            world.taken.clear()
            world.die(name, "failed: no GPU is free", Cause.ERROR)
        assert world.machine.given_up is None and world.machine.is_short
    assert world.taken[:2] == [Kill("rollout.5"), Kill("receiver.5")]
    assert world.taken[2] == Forgo(
        "rollout.5",
        "rollout.5 failed: no GPU is free; it did so before, and it has never worked; "
        "the run goes on with 4 replicas and 1 that stand by",
    )
    world.tell(Wanted(3))
    assert not world.machine.is_short, "it has what was asked for"


def test_without_one_that_stands_by_a_forgone_replica_leaves_the_run_with_one_less() -> None:
    world = make_world(replicas=2)
    world.tell(Wanted(3))
    for _ in range(2):
        world.taken.clear()
        world.die("rollout.2", "failed: no GPU is free", Cause.ERROR)
    assert isinstance(world.taken[-1], Forgo)
    assert world.taken[-1].reason.endswith("the run goes on with 2 replicas and 0 that stand by")
    assert world.machine.wanted == 2


def test_a_fleet_of_any_size_has_the_lowest_indices_that_leavers_do_not_hold() -> None:
    world = make_world(replicas=300)
    world.tell(Wanted(298))
    world.taken.clear()
    world.tell(Wanted(1000))
    replicas = [int(name.partition(".")[2]) for name in started(world) if name.startswith("rollout.")]
    assert replicas == list(range(300, 1002))
    world.finish_drain(298)
    world.taken.clear()
    world.tell(Wanted(1001))
    assert started(world) == ["rollout.298", "receiver.298"]


def test_fewer_that_stand_by_are_wanted_and_the_newest_leaves_once() -> None:
    world = make_world(replicas=1, standby=2)
    world.taken.clear()
    world.tell(Wanted(standby=1))
    assert world.taken == [Drain(2)]
    world.tell(Leave(2))
    assert world.taken == [Drain(2)], "it is leaving already"


def test_a_word_of_a_service_that_has_no_process_changes_nothing() -> None:
    world = make_world()
    world.taken.clear()
    world.tell(Heard("rollout.9", "ENDED"))
    assert world.taken == []


def test_a_service_that_ends_unasked_is_started_again() -> None:
    world = make_world()
    world.taken.clear()
    world.states["publisher.0"] = "ENDED"
    world.wait(0.25)
    assert world.taken == [Kill("publisher.0"), Start("publisher.0")]


def test_a_new_supervisor_goes_on_where_the_last_one_was() -> None:
    world = make_world(replicas=2, standby=1, max_restarts=3)
    world.die("rollout.0")
    world.bring_up()
    world.die("buffer.0")
    world.bring_up()
    world.die("buffer.0")  # to be started in a second
    world.tell(Leave(1))
    saved = dump(world.machine)
    again = restore(world.machine.rules, saved, now=5.0)
    assert dump(again) == saved
    assert again.names == world.machine.names
    effects = [effect for now in (5.1, 7.0) for effect in again.apply(Gone("x.0", "is no service"), now)]
    assert effects == []
    other = World(world.machine.rules, again, now=7.0)
    other.states = world.states
    other.wait(1.0)
    assert "buffer.0" in started(other)
    assert [unit.index for unit in again.leavers] == [1]


class Fleet(RuleBasedStateMachine):
    """Services come up, die, hang and come back in any order, while the wanted number changes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(FleetRules(num_ranks=2, num_publishers=2, max_restarts=3, start_deadline_s=30.0))
        self.world.tell(Begin(2, 1))

    @rule(data=st.data())
    def come_up(self, data: st.DataObject) -> None:
        if self.world.running:
            self.world.bring_up(data.draw(st.sampled_from(sorted(self.world.running))))

    @rule(data=st.data(), cause=st.sampled_from([Cause.DEATH, Cause.DEATH, Cause.ERROR]))
    def die(self, data: st.DataObject, cause: Cause) -> None:
        if self.world.running:
            self.world.die(data.draw(st.sampled_from(sorted(self.world.running))), "was hit", cause)

    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        if self.world.running:
            victims = data.draw(st.sampled_from([self.world.silent, self.world.halted]))
            victims.add(data.draw(st.sampled_from(sorted(self.world.running))))

    @rule()
    def work(self) -> None:
        """The restarts of who is up, and was heard to be, are forgotten."""
        self.world.work()
        if self.world.states.get("learner.0") == "READY":
            for key, stage in self.world.machine.stages().items():
                for name in self.world.machine.units[key].members if stage is Stage.READY else ():
                    self.world.starts[name].clear()

    @rule(replicas=st.integers(0, 4), standby=st.integers(0, 2))
    def want(self, replicas: int, standby: int) -> None:
        self.world.tell(Wanted(replicas, standby))

    @rule(index=st.integers(0, 5))
    def leave(self, index: int) -> None:
        self.world.tell(Leave(index))

    @rule(seconds=st.sampled_from([0.25, 3.0, 25.0, 70.0, 300.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def take_over(self) -> None:
        """The supervisor dies; the next one finds what is running."""
        world = self.world
        if world.machine.given_up is None:
            world.machine = restore(world.machine.rules, dump(world.machine), world.now)

    @invariant()
    def what_it_believes_to_run_does(self) -> None:
        if self.world.machine.given_up is None:
            assert set(self.world.machine.names) == self.world.running

    @invariant()
    def no_budget_is_overdrawn(self) -> None:
        for name, times in self.world.starts.items():
            if name.split(".")[0] in ("rollout", "receiver"):
                continue  # an index may be given to another replica
            for begin in times:
                within = [then for then in times if begin <= then < begin + WINDOW_S]
                assert len(within) <= 3 + (begin == times[0]), f"{name} was started at {within}"

    @invariant()
    def there_are_as_many_as_wanted_after_each_event(self) -> None:
        machine = self.world.machine
        if machine.given_up is None:
            assert (len(machine.replicas), len(machine.standbys)) == (machine.wanted, machine.wanted_standby)

    @precondition(lambda self: self.world.machine.given_up is None)
    @rule()
    def peace_returns(self) -> None:
        """Liveness: if nobody fails any more, all that is wanted comes up."""
        world = self.world
        world.silent.clear()
        world.halted.clear()
        end = world.now + BACK_OFFS_S[-1]
        for _ in range(12):
            world.bring_up()
            for unit in world.machine.leavers:
                world.finish_drain(unit.index)
            world.wait(4.0)
        while Stage.RETIRED in world.machine.stages().values() and world.now < end:
            world.wait(10.0)
            world.bring_up()
        machine = world.machine
        assert machine.given_up is None
        assert not machine.is_degraded and not machine.leavers
        assert (len(machine.replicas), len(machine.standbys)) == (machine.wanted, machine.wanted_standby)
        core = Counter(name for name in machine.names if name.split(".")[0] not in ("rollout", "receiver"))
        pairs = [f"{kind}.{index}" for kind in ("learner", "publisher") for index in (0, 1)]
        assert core == Counter(["buffer.0", "weight_sync.0", *pairs])


Fleet.TestCase.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
test_however_services_fail_the_rules_hold = Fleet.TestCase
