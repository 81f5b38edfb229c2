"""Simulated weight sync: what a receiver loads, and how long that takes."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from asyncrl.planner.actors.weights import ReceiverActor
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
