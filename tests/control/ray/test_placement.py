"""Placement of services on the nodes of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.control.ray.bootstrap import needs_of
from asyncrl.control.ray.placement import Node, Placement
from asyncrl.control.roster import Roster
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError

HOME = Node("home", "10.0.0.1", cpus=8, gpus=2)
B = Node("b", "10.0.0.2", cpus=8, gpus=2)
C = Node("c", "10.0.0.3", cpus=8, gpus=2)
NODES = (HOME, B, C)


def place(placement: Placement, count: int, nodes: tuple[Node, ...] = NODES, **needs: float) -> list[str]:
    return [placement.choose(nodes, f"rollout.{index}", **needs) for index in range(count)]


def test_what_a_run_has_once_lives_at_home() -> None:
    placement = Placement("home")
    for name in ("supervisor.0", "buffer.0", "weight_sync.0", "publisher.0", "learner.0", "learner.1"):
        assert placement.choose(NODES, name) == "home"


def test_replicas_are_spread_and_home_comes_last() -> None:
    assert place(Placement("home"), 5) == ["b", "c", "home", "b", "c"]


def test_a_new_supervisor_counts_what_the_services_it_found_were_started_with() -> None:
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
    config = Config(**sections, learner={"gpus": 2}, rollout={"gpus": 2})
    roster = Roster(config, Path("runs/a"), "id", Path("sockets"), "")
    needs = needs_of(config)
    for name in ("buffer.0", "weight_sync.0", "publisher.0", "learner.0", "rollout.0", "receiver.0"):
        spec = roster.spec(name)
        assert needs.get(name.partition(".")[0], (0.0, 0.0)) == (spec.cpus, spec.gpus)
    placement = Placement("home", needs)
    placement.recall("learner.0", "home")
    assert placement.choose((HOME, B), "rollout.0", cpus=1, gpus=2) == "b"
    with pytest.raises(ConfigError, match="room"):
        placement.choose((HOME, B), "rollout.1", cpus=1, gpus=2)  # the learner holds the GPUs of home


def test_a_receiver_goes_where_its_engine_is_and_an_engine_where_its_receiver_is() -> None:
    placement = Placement("home")
    assert place(placement, 2) == ["b", "c"]
    assert [placement.choose(NODES, f"receiver.{index}") for index in (1, 0)] == ["c", "b"]
    assert placement.choose(NODES, "receiver.1") == "c"
    assert placement.choose(NODES, "rollout.1") == "c"


def test_gpus_decide_where_there_are_some() -> None:
    bare = Node("bare", "10.0.0.9", cpus=64)
    placement = Placement("home")
    placement.choose((HOME, bare), "learner.0", gpus=2.0)
    with pytest.raises(
        ConfigError, match=r"no node has room for rollout\.0.*10\.0\.0\.1 has 8 of 8 CPUs and 0"
    ):
        placement.choose((HOME, bare), "rollout.0", cpus=1.0, gpus=1.0)
    assert placement.choose((HOME, bare, B), "rollout.0", cpus=1.0, gpus=1.0) == "b"


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_replica_of_several_gpus_has_all_of_them_on_one_node(gpus: int) -> None:
    nodes = tuple(Node(f"n{index}", f"10.0.0.{index}", cpus=32, gpus=8) for index in range(4))
    placement, per_node = Placement("n0"), 8 // gpus
    found = place(placement, 4 * per_node, nodes, cpus=1, gpus=gpus)
    assert all(found.count(node.id) == per_node for node in nodes)
    with pytest.raises(ConfigError, match="Add a node, or ask for fewer replicas"):
        placement.choose(nodes, "rollout.99", cpus=1, gpus=gpus)
    with pytest.raises(ConfigError, match=r"runs on one node: lower rollout\.gpus"):
        placement.choose(nodes, "rollout.99", cpus=1, gpus=16)


def test_a_replica_of_a_node_that_is_gone_goes_to_another() -> None:
    placement = Placement("home")
    place(placement, 2)
    placement.choose(NODES, "receiver.0")
    assert placement.choose((HOME, C), "rollout.0") == "home"
    assert placement.choose((HOME, C), "receiver.0") == "home"


def test_a_place_that_is_given_back_is_given_out_again() -> None:
    placement = Placement("home")
    full = (Node("b", "10.0.0.2", cpus=1.0),)
    place(placement, 1, full, cpus=1.0)
    with pytest.raises(ConfigError, match="Add a node, or ask for fewer replicas"):
        placement.choose(full, "rollout.1", cpus=1.0)
    placement.forget("rollout.0")
    assert placement.choose(full, "rollout.1", cpus=1.0) == "b"


def test_a_service_that_starts_again_does_not_count_against_itself() -> None:
    placement, full = Placement("home"), (Node("b", "10.0.0.2", cpus=1.0),)
    assert place(placement, 1, full, cpus=1.0) == place(placement, 1, full, cpus=1.0) == ["b"]


def test_what_an_earlier_supervisor_placed_takes_its_room() -> None:
    placement = Placement("home", {"rollout": (8.0, 1.0)})
    placement.recall("rollout.0", "b")
    placement.recall("rollout.0", "c")
    assert placement.node_of("rollout.0") == "b"
    assert placement.choose(NODES, "rollout.1", cpus=8.0, gpus=1.0) == "c"
    assert placement.choose(NODES, "receiver.0") == "b"


@given(
    st.lists(st.tuples(st.sampled_from(["start", "kill", "lose", "join"]), st.integers(0, 5)), max_size=40)
)
def test_no_node_gets_more_than_it_has_and_replicas_stay_whole(moves: list[tuple[str, int]]) -> None:
    placement, alive, placed = Placement("home"), {node.id: node for node in NODES}, {}
    for move, index in moves:
        name = f"rollout.{index}"
        if move == "kill":
            placement.forget(name)
            placement.forget(f"receiver.{index}")
            placed.pop(index, None)
        elif move == "lose":
            lost = ("b", "c")[index % 2]
            alive.pop(lost, None)
        elif move == "join":
            alive |= {node.id: node for node in NODES}
        else:
            try:
                placed[index] = placement.choose(tuple(alive.values()), name, cpus=4.0, gpus=1.0)
            except ConfigError:
                placed.pop(index, None)
                continue
            assert placement.choose(tuple(alive.values()), f"receiver.{index}") == placed[index]
        for node in NODES:
            assert sum(where == node.id for where in placed.values()) <= node.gpus
