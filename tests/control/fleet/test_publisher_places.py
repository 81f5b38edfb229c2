"""Publishers of a learner over several nodes: where they run, who writes for them, and when they move."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.control.ray.cluster_launcher import ClusterLauncher
from asyncrl.control.ray.placement import Node, Placement
from asyncrl.control.roster import Roster
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.sockets.keys import make_run_keys
from tests.control.ray.test_cluster_launcher import MemoryLauncher

HOME, B, C = (Node(name, f"10.0.0.{at}", cpus=2) for at, name in enumerate(("home", "b", "c"), start=1))
SECTIONS = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
SIX = Config(**SECTIONS, learner={"cpus": 1, "dp": 6, "groups_per_step": 6})
RANKS = [f"learner.{rank}" for rank in range(6)]
PUBLISHERS = [f"publisher.{index}" for index in range(3)]


def placed(nodes: list[Node]) -> Placement:
    found = Placement("home", SIX)
    for name in [*RANKS, *PUBLISHERS]:
        found.choose(nodes, name, cpus=float(name in RANKS))
    return found


def test_each_node_of_the_learner_has_a_publisher_and_its_first_rank_writes_for_it() -> None:
    placement = placed([HOME, B, C])
    assert [placement.node_of(name) for name in PUBLISHERS] == ["home", "b", "c"]
    assert [placement.seat_of(name)[1] for name in PUBLISHERS] == ["learner.0", "learner.2", "learner.4"]


def test_publishers_on_fewer_nodes_than_at_the_start_share_them() -> None:
    placement = placed([HOME, Node("b", "10.0.0.2", cpus=4)])
    assert [placement.node_of(name) for name in PUBLISHERS] == ["home", "b", "home"]
    assert [placement.seat_of(name)[1] for name in PUBLISHERS] == ["learner.0", "learner.2", "learner.0"]


def test_a_publisher_waits_for_a_place_of_the_ranks_and_the_first_one_does_not() -> None:
    placement = Placement("home", SIX)
    assert placement.choose([HOME, B], "publisher.0") == "home"
    with pytest.raises(ConfigError, match="the learner's 6 ranks"):
        placement.choose([HOME, B], "publisher.1")
    assert placement.seat_of("publisher.1") == ("", "")


def test_a_rank_knows_the_publishers_that_it_writes_for_and_no_other_than_the_first() -> None:
    roster = Roster(SIX, Path("runs/a"), "id", Path("sockets"), "", num_publishers=3, keys=make_run_keys())
    inner = MemoryLauncher()
    specs = []
    inner.start = specs.append  # type: ignore[method-assign]
    launcher = ClusterLauncher(inner, Placement("home", SIX), lambda: [HOME, B, C], lambda *_: None)
    for name in [*RANKS, *PUBLISHERS]:
        launcher.start(roster.spec(name))
    named = {one.name: {to for to in one.context.addresses if to in PUBLISHERS} for one in specs}
    assert named == {
        **{name: {"publisher.0"} for name in [*RANKS, *PUBLISHERS]},
        "learner.2": {"publisher.0", "publisher.1"},
        "learner.4": {"publisher.0", "publisher.2"},
    }
    stripes = {one.name: (one.context.rank, one.context.world_size) for one in specs}
    assert [stripes[name] for name in PUBLISHERS] == [(0, 3), (1, 3), (2, 3)]
    assert stripes["learner.4"] == (4, 6)
    assert all(one.context.server_keys for one in specs if one.name in PUBLISHERS)


def test_a_publisher_whose_node_has_no_rank_any_more_is_dead_once_the_ranks_have_places() -> None:
    nodes, moved = [HOME, B, C], Node("d", "10.0.0.4", cpus=2)
    inner, placement = MemoryLauncher(), Placement("home", SIX)
    launcher = ClusterLauncher(inner, placement, lambda: nodes, lambda *_: None)
    roster = Roster(SIX, Path("runs/a"), "id", Path("sockets"), "", num_publishers=3)
    for name in [*RANKS, *PUBLISHERS]:
        launcher.start(roster.spec(name))
    assert dead_of(launcher) == []
    nodes[:] = [HOME, C, moved]  # b is away, and what was there has died with it
    for name in [*RANKS, "publisher.1"]:
        launcher.kill(name)
    assert dead_of(launcher) == [], "publishers stay while ranks have no place"
    for name in RANKS:
        placement.choose(nodes, name, cpus=1.0)
    assert placement.seat_of("publisher.2") == ("d", "learner.4")
    assert dead_of(launcher) == ["publisher.2"]
    launcher.kill("publisher.2")
    placement.choose(nodes, "publisher.2")
    assert placement.node_of("publisher.2") == "d"


def dead_of(launcher: ClusterLauncher) -> list[str]:
    known = [name for name in PUBLISHERS if name in launcher.adopt()]
    return [name for name, found in launcher.statuses(known, 1.0).items() if found.state == "DEAD"]
