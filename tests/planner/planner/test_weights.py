"""Simulated weight sync: what a receiver loads, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest

from asyncrl.planner.actors.weights import PUBLISHER_NAME, PublisherActor, ReceiverActor
from asyncrl.planner.calibration import measure
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import LengthsModel, Setting
from asyncrl.planner.simulation import Simulation
from asyncrl.planner.world import Actor, Args, World
from tests.planner.planner.runs import RATES, make_config, make_setting, rows_of, run

SHORT = Rates(decode=((1.0, 200.0), (64.0, 3000.0)), step_s=0.1, step_s_per_token=1e-5)


class SwapRecorder(Actor):
    """A replica that only writes down which versions it is told to load."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.swaps: list[int] = []

    def on_swap(self, src: str, args: Args, call: int) -> None:
        self.swaps.append(args["number"])

    def on_fence(self, src: str, args: Args, call: int) -> None:
        """Nothing is leased here."""


def order(receiver: ReceiverActor, kind: str, **fields: int) -> None:
    receiver.on_order("weight_sync.0", {"kind": kind, "token": 1, **fields}, 0)


def receive(receiver: ReceiverActor, round_id: int, number: int) -> None:
    order(receiver, "offer", round=round_id)
    order(receiver, "transfer", round=round_id)
    receiver.on_bytes("publisher.0", {"round": round_id, "number": number}, 0)


@pytest.fixture
def pair() -> tuple[World, ReceiverActor, SwapRecorder]:
    world = World(0)
    replica = SwapRecorder(world, "rollout.0")
    receiver = ReceiverActor(world, "receiver.0", make_setting(), (replica.name,))
    world.actors |= {replica.name: replica, receiver.name: receiver}
    receiver.on_attend(replica.name, {"number": 0, "life": "1"}, 0)
    return world, receiver, replica


def test_a_commit_that_a_newer_version_has_overtaken_loads_the_newer_one(pair) -> None:
    world, receiver, replica = pair
    receive(receiver, 1, 16)
    receive(receiver, 2, 17)
    order(receiver, "commit", number=16)
    world.run(lambda: False)
    assert replica.swaps == [17], "as `Shelf.commit` lets the engine have it"
    order(receiver, "commit", number=17)
    world.run(lambda: False)
    assert replica.swaps == [17], "it is loaded once"


def test_a_commit_of_what_has_not_come_loads_nothing(pair) -> None:
    world, receiver, replica = pair
    receive(receiver, 1, 16)
    order(receiver, "commit", number=17)
    world.run(lambda: False)
    assert replica.swaps == []


@pytest.mark.parametrize("replicas", range(2, 9))
def test_no_step_waits_for_a_lost_commit(replicas: int) -> None:
    """Such a step takes the deadline of weight sync, a minute here, and others a fraction of a second."""
    config = make_config("rollout.group_size=8", "learner.groups_per_step=16", "rollout.max_tokens=7")
    setting = Setting.of(config, LengthsModel(1.0, 6.0), prompt_tokens=10.0)
    setting = replace(setting, replicas=replicas, lengths=LengthsModel(1.0, 6.0), max_sequences=128)
    found = Simulation(setting, SHORT, seed=0, steps=60).run_to_end()
    assert max(found.step_times_s) < 5 * median(found.step_times_s)


def test_the_sync_of_a_simulation_is_what_its_rows_measure() -> None:
    setting = make_setting("rollout.replicas=4", "weight_sync.parallelism=1")
    simulation = run(setting, RATES, steps=20)
    measured, found = measure(rows_of(simulation), setting.ledger.groups_per_step), simulation.outcome()
    assert found.sync_s == pytest.approx(measured.sync_s)
    assert found.spread_s > found.sync_s + 2 * RATES.swap_s, "the swaps of four, one after another"


@pytest.mark.parametrize(("version_bytes", "is_served"), [(65.5e9, True), (0.0, False)])
def test_deadlines_of_a_simulation_grow_with_a_versions_bytes(version_bytes: float, is_served: bool) -> None:
    """Qwen3-32B over gloo: 95 s on its way, 22 s to load; `weight_sync.deadline_s` is 60."""
    large = replace(RATES, transfer_s=95.0, swap_s=22.0, version_bytes=version_bytes)
    simulation = Simulation(make_setting("learner.minibatches=1"), large, 0, 2)
    simulation.run(until_s=1200.0)
    assert bool(simulation.watch.records) is is_served


def run_crowded(*settings: str) -> tuple[Simulation, Callable[[], None]]:
    """Return a run in whose publisher transfers hang from the first version on, and what ends them."""
    simulation = Simulation(make_setting("learner.minibatches=1", *settings), RATES, 0, 12)
    simulation.world.run(lambda: 1 in simulation.watch.published)
    publisher = simulation.world.actors[PUBLISHER_NAME]
    assert isinstance(publisher, PublisherActor)
    held = list(enumerate(publisher._slots._unused()))
    for round_id, slot in held:
        publisher._sending[-round_id] = slot
        slot.num_transfers += 1

    def end_transfers() -> None:
        for round_id, _ in held:
            publisher._forget(-round_id)

    return simulation, end_transfers


def check_to_end(simulation: Simulation) -> None:
    simulation.run(until_s=3600.0)
    assert simulation.watch.is_over and len(simulation.watch.records) == 12
    assert len(simulation.watch.published) == max(simulation.watch.published)


@pytest.mark.parametrize("streams", ["true", "false"])
def test_weights_that_found_no_free_slot_go_out_once_a_transfer_has_ended(streams: str) -> None:
    simulation, end_transfers = run_crowded(f"learner.stream={streams}")
    simulation.world.at(30.0, end_transfers)
    check_to_end(simulation)
    assert 30.0 < simulation.watch.published[2] < 30.0 + RATES.publish_s + 20 * RATES.rpc_s


def test_a_slot_that_is_free_during_a_step_is_taken_at_its_end() -> None:
    simulation, end_transfers = run_crowded()
    learner, watch = simulation.learner, simulation.watch
    assert learner is not None
    simulation.world.run(lambda: learner.step == 1 and bool(learner._groups))
    end_transfers()
    check_to_end(simulation)
    ended = watch.records[1].ended
    assert ended < watch.published[2] < ended + RATES.publish_s + 20 * RATES.rpc_s
