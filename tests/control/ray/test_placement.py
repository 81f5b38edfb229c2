"""Placement of services on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import ValuesView
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.control.ray.placement import Claim, Node, Placement, pack_ranks
from asyncrl.control.roster import Roster
from asyncrl.core.config.tree import Config, LearnerSection
from asyncrl.core.errors import ConfigError

HOME = Node("home", "10.0.0.1", cpus=8, gpus=2)
B = Node("b", "10.0.0.2", cpus=8, gpus=2)
C = Node("c", "10.0.0.3", cpus=8, gpus=2)
NODES = (HOME, B, C)
SECTIONS = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
LIGHT = Config(**SECTIONS, learner={"cpus": 0})


def place(placement: Placement, count: int, nodes: tuple[Node, ...] = NODES, **needs: float) -> list[str]:
    return [placement.choose(nodes, f"rollout.{index}", **needs) for index in range(count)]


def test_what_a_run_has_once_lives_at_home() -> None:
    placement = Placement("home", LIGHT)
    for name in ("supervisor.0", "buffer.0", "weight_sync.0", "publisher.0", "learner.0", "learner.1"):
        assert placement.choose(NODES, name) == "home"


def test_replicas_are_spread_and_home_comes_last() -> None:
    assert place(Placement("home", LIGHT), 5) == ["b", "c", "home", "b", "c"]


def test_a_new_supervisor_counts_what_the_services_it_found_were_started_with() -> None:
    config = Config(**SECTIONS, learner={"gpus": 2}, rollout={"gpus": 2})
    roster = Roster(config, Path("runs/a"), "id", Path("sockets"), "")
    for name in ("buffer.0", "publisher.0", "learner.0", "rollout.0", "receiver.0"):
        known, spec = Placement("home", config), roster.spec(name)
        known.recall(name, "home")
        assert known._claims[name] == Claim(("home",), spec.cpus, spec.gpus)
    placement = Placement("home", config)
    placement.recall("learner.0", "home")
    assert placement.choose((HOME, B), "rollout.0", cpus=1, gpus=2) == "b"
    with pytest.raises(ConfigError, match="room"):
        placement.choose((HOME, B), "rollout.1", cpus=1, gpus=2)  # the learner holds the GPUs of home


def test_a_receiver_goes_where_its_engine_is_and_an_engine_where_its_receiver_is() -> None:
    placement = Placement("home", LIGHT)
    assert place(placement, 2) == ["b", "c"]
    assert [placement.choose(NODES, f"receiver.{index}") for index in (1, 0)] == ["c", "b"]
    assert placement.choose(NODES, "receiver.1") == "c"
    assert placement.choose(NODES, "rollout.1") == "c"


def test_gpus_decide_where_there_are_some() -> None:
    bare = Node("bare", "10.0.0.9", cpus=64)
    placement = with_learner(gpus=2, cpus=0)
    placement.choose((HOME, bare), "learner.0", gpus=2.0)
    with pytest.raises(
        ConfigError, match=r"no node has room for rollout\.0.*10\.0\.0\.1 has 8 of 8 CPUs and 0"
    ):
        placement.choose((HOME, bare), "rollout.0", cpus=1.0, gpus=1.0)
    assert placement.choose((HOME, bare, B), "rollout.0", cpus=1.0, gpus=1.0) == "b"


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_replica_of_several_gpus_has_all_of_them_on_one_node(gpus: int) -> None:
    nodes = tuple(Node(f"n{index}", f"10.0.0.{index}", cpus=32, gpus=8) for index in range(4))
    placement, per_node = Placement("n0", LIGHT), 8 // gpus
    found = place(placement, 4 * per_node, nodes, cpus=1, gpus=gpus)
    assert all(found.count(node.id) == per_node for node in nodes)
    with pytest.raises(ConfigError, match="Add a node, or ask for fewer replicas"):
        placement.choose(nodes, "rollout.99", cpus=1, gpus=gpus)
    with pytest.raises(ConfigError, match=r"Lower rollout\.gpus.* or set rollout\.engine_args: {nnodes: N}"):
        placement.choose(nodes, "rollout.99", cpus=1, gpus=16)


def test_a_replica_of_a_node_that_is_gone_goes_to_another() -> None:
    placement = Placement("home", LIGHT)
    place(placement, 2)
    placement.choose(NODES, "receiver.0")
    assert placement.choose((HOME, C), "rollout.0") == "home"
    assert placement.choose((HOME, C), "receiver.0") == "home"


class ReadClaims(dict[str, Claim]):
    """The claims on a node, which count how often they were added up."""

    num_reads = 0

    def values(self) -> ValuesView[Claim]:
        self.num_reads += 1
        return super().values()


def test_replicas_that_wait_do_not_add_up_the_claims_of_every_node() -> None:
    placement, node = Placement("home", LIGHT), Node("b", "10.0.0.2", cpus=8.0)
    place(placement, 8, (node,), cpus=1.0)
    claims = placement._claims_on["b"] = ReadClaims(placement._claims_on["b"])
    for index in range(8, 40):
        with pytest.raises(ConfigError, match=r"10\.0\.0\.2 has 0 of 8 CPUs"):
            placement.choose((node,), f"rollout.{index}", cpus=1.0)
    assert claims.num_reads == 1
    placement.forget("rollout.3")
    assert placement.choose((node,), "rollout.39", cpus=1.0) == "b"


def test_a_place_that_is_given_back_is_given_out_again() -> None:
    placement = Placement("home", LIGHT)
    full = (Node("b", "10.0.0.2", cpus=1.0),)
    place(placement, 1, full, cpus=1.0)
    with pytest.raises(ConfigError, match="Add a node, or ask for fewer replicas"):
        placement.choose(full, "rollout.1", cpus=1.0)
    placement.forget("rollout.0")
    assert placement.choose(full, "rollout.1", cpus=1.0) == "b"


def test_a_service_that_starts_again_does_not_count_against_itself() -> None:
    placement, full = Placement("home", LIGHT), (Node("b", "10.0.0.2", cpus=1.0),)
    assert place(placement, 1, full, cpus=1.0) == place(placement, 1, full, cpus=1.0) == ["b"]


def test_what_an_earlier_supervisor_placed_takes_its_room() -> None:
    placement = Placement("home", Config(**SECTIONS, learner={"cpus": 0}, rollout={"cpus": 8, "gpus": 1}))
    placement.recall("rollout.0", "b")
    placement.recall("rollout.0", "c")
    assert placement.nodes_of("rollout.0") == ("b",)
    assert placement.choose(NODES, "rollout.1", cpus=8.0, gpus=1.0) == "c"
    assert placement.choose(NODES, "receiver.0") == "b"


@given(
    st.lists(st.tuples(st.sampled_from(["start", "kill", "lose", "join"]), st.integers(0, 5)), max_size=40)
)
def test_no_node_gets_more_than_it_has_and_replicas_stay_whole(moves: list[tuple[str, int]]) -> None:
    placement, alive, placed = Placement("home", LIGHT), {node.id: node for node in NODES}, {}
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


def with_learner(**learner: object) -> Placement:
    return Placement("home", Config(**SECTIONS, learner=learner))


def ranks_of(placement: Placement, count: int, nodes: tuple[Node, ...] = NODES) -> list[str]:
    return [placement.choose(nodes, f"learner.{rank}") for rank in range(count)]


def test_learner_ranks_fill_home_and_then_the_nodes_with_most_room() -> None:
    large = Node("large", "10.0.0.9", cpus=8, gpus=4)
    placement = with_learner(dp=6, gpus=1)
    assert ranks_of(placement, 6, (B, large, HOME)) == ["home"] * 2 + ["large"] * 4


def test_room_for_the_learner_is_kept_from_replicas_that_start_first() -> None:
    placement = with_learner(dp=4, gpus=1)
    assert place(placement, 2, gpus=1.0) == ["c", "c"]
    with pytest.raises(ConfigError, match=r"no node has room for rollout\.2"):
        placement.choose(NODES, "rollout.2", gpus=1.0)
    assert ranks_of(placement, 4) == ["home", "home", "b", "b"]


def test_no_rank_has_a_place_before_all_have_one_and_new_replicas_wait_for_them() -> None:
    placement = with_learner(dp=4, gpus=1)
    for name in ("learner.0", "learner.3", "rollout.0"):
        with pytest.raises(ConfigError, match=r"the learner's 4 ranks, each with 1 CPUs and 1 GPUs"):
            placement.choose((HOME,), name, gpus=1.0)
    assert placement.choose((HOME,), "buffer.0") == "home", "what the learner needs starts whatever it lacks"
    assert placement.placed_on("home") == ["buffer.0"]
    assert ranks_of(placement, 4) == ["home", "home", "b", "b"]


def test_a_learner_whose_node_is_gone_gets_new_places_before_waiting_replicas() -> None:
    placement = with_learner(dp=4, gpus=1)
    ranks_of(placement, 4)
    with pytest.raises(ConfigError):
        placement.choose((HOME,), "rollout.0", gpus=1.0)
    for rank in range(4):
        placement.forget(f"learner.{rank}")
    with pytest.raises(ConfigError):
        placement.choose((HOME, C), "rollout.0", gpus=1.0)  # what is left of c is the learner's
    assert ranks_of(placement, 4, (HOME, C)) == ["home", "home", "c", "c"]


def test_places_that_a_new_supervisor_finds_are_those_of_the_ranks_that_run() -> None:
    placement = with_learner(dp=4, gpus=1)
    placement.choose(NODES, "rollout.0")  # before any status has come
    for rank, node in enumerate(("home", "c", "c", "b")):
        placement.recall(f"learner.{rank}", node)
    assert ranks_of(placement, 4) == ["home", "c", "c", "b"]


def test_ranks_that_run_stay_where_they_are_while_another_looks_for_a_place() -> None:
    placement = with_learner(dp=2, gpus=1)
    placement.recall("learner.0", "b")
    assert placement.choose(NODES, "learner.1") == "home"
    placement.forget("learner.1")
    placement.choose((HOME, B, C), "rollout.0", gpus=2)
    assert ranks_of(placement, 2) == ["b", "home"]
    assert placement.choose((HOME, C), "learner.1") == "home", "all are placed anew when a node is gone"
    assert placement.nodes_of("learner.0") == ("home",)


def test_no_rank_has_a_place_while_home_is_gone() -> None:
    with pytest.raises(ConfigError, match="home is not among the living nodes"):
        with_learner(dp=2, gpus=1).choose((B, C), "learner.0")


def test_an_engine_goes_beside_its_receiver_only_where_there_is_room() -> None:
    placement = Placement("home", LIGHT)
    assert placement.choose(NODES, "rollout.0", gpus=2) == placement.choose(NODES, "receiver.0") == "b"
    placement.forget("rollout.0")
    assert placement.choose((B,), "rollout.1", gpus=2) == "b"
    with pytest.raises(ConfigError, match=r"no node has room for rollout\.0"):
        placement.choose(NODES, "rollout.0", gpus=2)


SIZES = st.integers(1, 3)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), SIZES, SIZES, SIZES, SIZES)
def test_any_layout_has_a_place_for_each_rank_and_keeps_what_fits_on_a_node_together(
    rooms: list[int], tp: int, pp: int, cp: int, dp: int
) -> None:
    learner = LearnerSection(tp=tp, pp=pp, cp=cp, dp=dp)
    names = {f"node{index}": room for index, room in enumerate(rooms)}
    found = pack_ranks(names, learner, range(learner.num_ranks))
    if not rooms[0] or sum(rooms) < learner.num_ranks:
        assert found is None
        return
    assert found is not None and sorted(found) == list(range(learner.num_ranks)) and found[0] == "node0"
    for name, room in names.items():
        assert list(found.values()).count(name) <= room
    for size, groups in groups_of(learner):
        whole = sum(len({found[rank] for rank in group}) == 1 for group in groups)
        # The first group is at home, which may be too small for it.
        most = len(groups) - (rooms[0] < size)
        assert whole >= min(most, sum(room // size for room in rooms))


def groups_of(learner: LearnerSection) -> list[tuple[int, list[list[int]]]]:
    """Return the groups of ranks of Megatron-core's order: copies of the model, stages, matrices, by size."""
    width = learner.tp * learner.cp
    stages = width * learner.dp
    of_copy = [
        [stage * stages + copy * width + rank for stage in range(learner.pp) for rank in range(width)]
        for copy in range(learner.dp)
    ]
    of_stage = [list(range(at, at + width)) for at in range(0, learner.num_ranks, width)]
    of_matrix = [list(range(at, at + learner.tp)) for at in range(0, learner.num_ranks, learner.tp)]
    return [(width * learner.pp, of_copy), (width, of_stage), (learner.tp, of_matrix)]


OVER_TWO = Config(
    **SECTIONS, learner={"cpus": 0}, rollout={"cpus": 8, "gpus": 4, "engine_args": {"nnodes": 2}}
)


def test_an_engine_over_two_nodes_takes_its_part_of_each_and_gives_both_back() -> None:
    placement = Placement("home", OVER_TWO)
    assert place(placement, 1, cpus=4.0, gpus=2.0) == ["b,c"]
    assert placement.choose(NODES, "receiver.0") == "b"
    assert placement.placed_on("c") == ["rollout.0"]
    with pytest.raises(
        ConfigError, match=r"no 2 nodes have room for rollout\.1, .* 2 GPUs of each: .*Add a node"
    ):
        placement.choose(NODES, "rollout.1", cpus=4.0, gpus=2.0)
    placement.forget("rollout.0")
    assert placement.choose(NODES, "rollout.1", cpus=4.0, gpus=2.0) == "b,c"


def test_an_engine_over_two_nodes_stays_with_its_receiver_and_waits_for_the_learner() -> None:
    placement = Placement("home", OVER_TWO)
    placement.choose((HOME, C), "receiver.0")
    assert placement.choose(NODES, "rollout.0", cpus=4.0, gpus=2.0) == "c,b"
    learner = Config(**SECTIONS, learner={"dp": 4, "gpus": 1}, rollout=OVER_TWO.rollout)
    with pytest.raises(ConfigError, match=r"no 2 nodes have room for rollout\.0"):
        Placement("home", learner).choose(NODES, "rollout.0", gpus=2.0)


def test_a_new_supervisor_counts_an_engine_on_all_its_nodes() -> None:
    placement, spec = Placement("home", OVER_TWO), Roster(OVER_TWO, Path("runs/a"), "id", Path("s"), "").spec
    placement.recall("rollout.0", "c,b")
    assert placement.nodes_of("rollout.0") == ("c", "b") and placement.placed_on("b") == ["rollout.0"]
    assert placement._claims["rollout.0"] == Claim(("c", "b"), spec("rollout.0").cpus, spec("rollout.0").gpus)
    assert (spec("rollout.0").cpus, spec("rollout.0").gpus) == (4.0, 2.0)
    with pytest.raises(ConfigError, match=r"no 2 nodes have room for rollout\.1"):
        placement.choose(NODES, "rollout.1", cpus=4.0, gpus=2.0)


def test_an_engine_over_nodes_beside_its_receiver_takes_no_room_of_the_learner() -> None:
    config = Config(**SECTIONS, learner={"dp": 4, "gpus": 1}, rollout=OVER_TWO.rollout)
    placement = Placement("home", config)
    placement.recall("receiver.0", "c")
    with pytest.raises(ConfigError, match=r"no 2 nodes have room for rollout\.0"):
        placement.choose(NODES, "rollout.0", gpus=2.0)
    assert ranks_of(placement, 4) == ["home", "home", "b", "b"]


def test_an_engine_over_nodes_waits_where_its_receiver_has_no_room_for_it() -> None:
    placement, full = Placement("home", OVER_TWO), Node("full", "10.0.0.9", cpus=8)
    placement.choose((full,), "receiver.0")
    with pytest.raises(ConfigError, match=r"no 2 nodes have room for rollout\.0"):
        placement.choose((*NODES, full), "rollout.0", gpus=2.0)
