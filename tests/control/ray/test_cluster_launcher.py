"""Services on nodes: who is started where, who waits, and what a node prepares for them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.diagnosis.obstacles import gather
from asyncrl.control.fleet.messages import Cause as GoneCause
from asyncrl.control.fleet.messages import Gone
from asyncrl.control.ray import cluster_launcher
from asyncrl.control.ray.bootstrap import namespace_of
from asyncrl.control.ray.cluster_launcher import WAITING, ClusterLauncher
from asyncrl.control.ray.host import settle
from asyncrl.control.ray.placement import Node, Placement
from asyncrl.control.reconciler.status_events import events_of
from asyncrl.control.roster import INTERFACE_VARIABLES, ServiceSpec
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, ServiceFailed
from asyncrl.core.files.private import make_private
from asyncrl.core.obstacle import Cause
from asyncrl.core.service import ServiceContext
from asyncrl.core.service_command import Drain
from asyncrl.core.status.statuses import Statuses
from tests.statuses import status_of, statuses_of

SECTIONS = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
CLUSTER = Config(**SECTIONS, learner={"cpus": 0}, launcher={"ray": "10.0.0.1:6379"})
HOME, OTHER = Node("home", "10.0.0.1", cpus=1.0), Node("b", "10.0.0.2", cpus=1.0)


class MemoryLauncher:
    """Keeps in memory what Ray would start."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}

    def start(self, spec: ServiceSpec) -> None:
        self.running[spec.name] = spec.node

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        return statuses_of({name: {"node": self.running[name]} for name in names})

    def command(self, name: str, command: Any, deadline_s: float) -> Any:
        raise AssertionError("nobody is commanded")

    def stop(self, names: Iterable[str], deadline_s: float) -> set[str]:
        return {name for name in names if self.running.pop(name, None) is not None}

    def kill(self, name: str) -> None:
        self.running.pop(name, None)

    def adopt(self) -> set[str]:
        return set(self.running)


def spec(name: str, cpus: float = 0.0) -> ServiceSpec:
    context = ServiceContext(CLUSTER, name, Path("runs/a"), "id")
    return ServiceSpec("module:build", context, "log", cpus=cpus)


@pytest.fixture
def nodes() -> list[Node]:
    return [HOME, OTHER]


@pytest.fixture
def inner() -> MemoryLauncher:
    return MemoryLauncher()


class SpreadLauncher(MemoryLauncher):
    """Of whose services some are in trouble."""

    def __init__(self) -> None:
        super().__init__()
        self.troubled: dict[str, dict[str, Any]] = {}

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        known = super().statuses(names, deadline_s)
        return known | statuses_of({name: found for name, found in self.troubled.items() if name in known})


class Cleaned(list[tuple[str, str]]):
    """Which services were cleaned up after, and where."""

    def __call__(self, node: str, name: str) -> None:
        self.append((node, name))


@pytest.fixture
def cleaned() -> Cleaned:
    return Cleaned()


@pytest.fixture
def launcher(
    inner: MemoryLauncher, nodes: list[Node], cleaned: Cleaned, monkeypatch: pytest.MonkeyPatch
) -> ClusterLauncher:
    monkeypatch.setattr(cluster_launcher, "TRY_EVERY_S", 0.0)
    return ClusterLauncher(inner, Placement("home", CLUSTER), lambda: nodes, cleaned)


def test_services_are_started_on_the_nodes_that_were_chosen(
    launcher: ClusterLauncher, inner: MemoryLauncher
) -> None:
    for name in ("buffer.0", "rollout.0", "receiver.0"):
        launcher.start(spec(name))
    assert inner.running == {"buffer.0": "home", "rollout.0": "b", "receiver.0": "b"}


def test_services_that_start_one_after_another_look_for_the_nodes_once_a_while(
    inner: MemoryLauncher, cleaned: Cleaned, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([[HOME], [HOME, OTHER]])
    launcher = ClusterLauncher(inner, Placement("home", CLUSTER), lambda: next(looks), cleaned)
    monkeypatch.setattr(cluster_launcher, "ASK_EVERY_S", 600.0)
    for index in range(5):
        launcher.start(spec(f"rollout.{index}"))
    monkeypatch.setattr(cluster_launcher, "ASK_EVERY_S", 0.0)
    launcher.start(spec("rollout.5"))
    assert inner.running == {f"rollout.{index}": "home" for index in range(5)} | {"rollout.5": "b"}


def test_a_replica_without_room_waits_and_is_started_when_a_node_joins(
    launcher: ClusterLauncher, inner: MemoryLauncher, nodes: list[Node]
) -> None:
    for index in range(3):
        launcher.start(spec(f"rollout.{index}", cpus=1.0))
    names = [*inner.running, "rollout.2"]
    found = launcher.statuses(names, 1.0)
    assert found["rollout.2"].state == WAITING
    assert "no node has room for rollout.2" in found["rollout.2"].error
    with pytest.raises(ServiceFailed, match=r"rollout\.2 waits for a node"):
        launcher.command("rollout.2", Drain(), 1.0)
    nodes.append(Node("c", "10.0.0.3", cpus=1.0))
    assert launcher.statuses(names, 1.0)["rollout.2"] == status_of("rollout.2", node="c")


def test_a_replica_without_room_is_started_in_the_place_of_one_that_is_gone(
    launcher: ClusterLauncher, inner: MemoryLauncher
) -> None:
    for index in range(3):
        launcher.start(spec(f"rollout.{index}", cpus=1.0))
    launcher.kill("rollout.0")
    assert launcher.statuses(["rollout.2"], 1.0)["rollout.2"].state == "READY"
    assert inner.running["rollout.2"] == "b"


def test_a_replica_that_could_not_be_started_once_there_was_room_waits_on(
    launcher: ClusterLauncher, inner: MemoryLauncher, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(3):
        launcher.start(spec(f"rollout.{index}", cpus=1.0))
    nodes.append(Node("c", "10.0.0.3", cpus=1.0))

    def refuse(spec: ServiceSpec) -> None:
        raise ServiceFailed(f"the name of {spec.name} is still taken")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "start", refuse)
        found = launcher.statuses(["rollout.2"], 1.0)["rollout.2"]
        assert found.state == WAITING and "still taken" in found.error
    assert launcher.statuses(["rollout.2"], 1.0)["rollout.2"] == status_of("rollout.2", node="c")


def test_who_waits_ends_at_once(launcher: ClusterLauncher, inner: MemoryLauncher) -> None:
    for index in range(4):
        launcher.start(spec(f"rollout.{index}", cpus=1.0))
    launcher.kill("rollout.3")
    assert launcher.stop([f"rollout.{index}" for index in range(3)], 1.0) == {
        f"rollout.{i}" for i in range(3)
    }
    assert inner.running == {}


def test_services_that_an_earlier_supervisor_placed_keep_their_room(
    inner: MemoryLauncher, nodes: list[Node], cleaned: Cleaned, launcher: ClusterLauncher
) -> None:
    launcher.start(spec("rollout.0", cpus=1.0))
    again = ClusterLauncher(inner, Placement("home", CLUSTER), lambda: nodes, cleaned)
    assert again.adopt() == {"rollout.0"}
    again.statuses(["rollout.0"], 1.0)
    again.start(spec("rollout.1", cpus=1.0))
    assert inner.running == {"rollout.0": "b", "rollout.1": "home"}


def test_what_a_killed_service_has_left_on_another_node_is_cleaned_up_there(
    launcher: ClusterLauncher, inner: MemoryLauncher, cleaned: Cleaned
) -> None:
    for name in ("buffer.0", "rollout.0", "receiver.0"):
        launcher.start(spec(name))
    for name in ("buffer.0", "receiver.0", "rollout.0", "rollout.7"):
        launcher.kill(name)
    assert inner.running == {}
    assert cleaned == [("b", "receiver.0"), ("b", "rollout.0")]


def test_an_engine_over_nodes_is_lost_with_any_of_them_and_cleaned_up_on_each(
    nodes: list[Node], cleaned: Cleaned
) -> None:
    config = Config(**SECTIONS, learner={"cpus": 0}, rollout={"engine_args": {"nnodes": 3}})
    inner, third = SpreadLauncher(), Node("c", "10.0.0.3", cpus=1.0)
    nodes.append(third)
    launcher = ClusterLauncher(inner, Placement("home", config), lambda: nodes, cleaned)
    launcher.start(spec("rollout.0", cpus=1.0))
    assert inner.running == {"rollout.0": "b,c,home"}
    inner.troubled["rollout.0"] = {"state": "FAILED", "error": "its workers are gone"}
    assert launcher.statuses(["rollout.0"], 1.0)["rollout.0"].error == "its workers are gone"
    nodes.remove(third)
    lost = launcher.statuses(["rollout.0"], 1.0)["rollout.0"]
    assert lost.state == "DEAD" and "the node 10.0.0.3 (c) is gone, and with it rollout.0" in lost.error
    launcher.kill("rollout.0")
    assert cleaned == [("b", "rollout.0"), ("c", "rollout.0")]


def test_runs_of_one_name_in_different_folders_have_namespaces_of_their_own() -> None:
    here, there = (
        CLUSTER.model_copy(update={"run": CLUSTER.run.model_copy(update={"dir": folder})})
        for folder in ("/a", "/b")
    )
    assert namespace_of(here) == namespace_of(here) != namespace_of(there)
    assert namespace_of(Config(**SECTIONS)) == "run"


def test_a_service_has_a_private_folder_for_sockets_and_one_for_what_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sockets"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        context = ServiceContext(CLUSTER, "receiver.0", tmp_path, "id", sockets=folder)
        settle(context)
        settle(context)
    finally:
        os.umask(before)
    temporary = folder / "tmp"
    assert [path.stat().st_mode & 0o777 for path in (folder, temporary)] == [0o700, 0o700]
    assert str(temporary) == tempfile.gettempdir() == os.environ["TMPDIR"], "of this process and its children"


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_folder_that_somebody_may_have_prepared_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "sockets"
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other")
    else:
        folder.touch(0o600)
    with pytest.raises(ConfigError, match="is no folder private to this user"):
        make_private(folder)


def test_torch_distributed_talks_over_the_interface_that_leads_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "before")
    context = ServiceContext(
        CLUSTER, "rollout.0", tmp_path, "id", addresses={"buffer.0": "tcp://127.0.0.1:1"}
    )
    assert settle(context).config.launcher.host == "127.0.0.1"
    assert {os.environ[name] for name in INTERFACE_VARIABLES} == {"lo"}
    monkeypatch.setenv(INTERFACE_VARIABLES[0], "before")
    settle(replace(context, config=Config(**SECTIONS)))
    assert os.environ[INTERFACE_VARIABLES[0]] == "before"


@pytest.mark.parametrize("ray", ["10.0.0.1:6379", "head-node.example:6379", "auto", "local"])
def test_a_cluster_is_named_by_its_address(ray: str) -> None:
    assert Config(**SECTIONS, launcher={"ray": ray}).launcher.is_cluster is (ray != "local")


@pytest.mark.parametrize("ray", ["ray://10.0.0.1:10001", "10.0.0.1", "loca", "-x:1", ""])
def test_what_is_no_address_of_a_cluster_is_refused(ray: str) -> None:
    with pytest.raises(ValueError, match=r"local, auto, or the HOST:PORT of a Ray cluster"):
        Config(**SECTIONS, launcher={"ray": ray})


SPREAD = Config(**SECTIONS, learner={"dp": 2}, launcher={"ray": "10.0.0.1:6379"})


@pytest.fixture
def spread(nodes: list[Node], cleaned: Cleaned, monkeypatch: pytest.MonkeyPatch) -> ClusterLauncher:
    """A launcher whose learner has a rank at home and one on the other node, which are full."""
    monkeypatch.setattr(cluster_launcher, "TRY_EVERY_S", 0.0)
    found = ClusterLauncher(SpreadLauncher(), Placement("home", SPREAD), lambda: nodes, cleaned)
    for rank in range(2):
        found.start(spec(f"learner.{rank}", cpus=1.0))
    found.start(spec("receiver.0"))
    return found


def inner_of(launcher: ClusterLauncher) -> SpreadLauncher:
    inner = launcher._launcher
    assert isinstance(inner, SpreadLauncher)
    return inner


def test_a_node_that_is_gone_is_named_with_all_that_went_with_it_and_what_to_do(
    spread: ClusterLauncher, nodes: list[Node]
) -> None:
    nodes.remove(OTHER)
    peer = {"state": "FAILED", "error": "RuntimeError: Connection closed by peer [10.0.0.2]"}
    inner_of(spread).troubled = {"learner.0": peer, "learner.1": {"state": "SILENT"}}
    found = spread.statuses(["learner.0", "learner.1"], 1.0)
    assert found["learner.0"].error == peer["error"]
    assert found["learner.1"].state == "DEAD"
    assert found["learner.1"].error == (
        "the node 10.0.0.2 (b) is gone, and with it learner.1, receiver.0; they are started again where "
        "there is room: bring the node back, or add another"
    )
    lost = events_of("id", found, lambda _: set())[0]
    assert isinstance(lost, Gone) and lost.name == "learner.1" and lost.cause is GoneCause.DEATH


def test_a_service_in_trouble_on_a_node_that_lives_is_itself_to_blame(spread: ClusterLauncher) -> None:
    inner_of(spread).troubled = {"learner.1": {"state": "FAILED", "error": "ValueError: x"}}
    found = spread.statuses(["learner.0", "learner.1"], 1.0)
    assert (found["learner.1"].state, found["learner.1"].error) == ("FAILED", "ValueError: x")


def test_a_learner_without_room_waits_aloud_as_a_whole_and_starts_when_a_node_joins(
    spread: ClusterLauncher, nodes: list[Node]
) -> None:
    nodes.remove(OTHER)
    ranks = ["learner.0", "learner.1"]
    for name in ranks:
        spread.kill(name)
    for name in ranks:
        spread.start(spec(name, cpus=1.0))
    found = spread.statuses(ranks, 1.0)
    assert [found[name].state for name in ranks] == [WAITING, WAITING]
    (obstacle,) = gather(found)
    assert (obstacle.service, obstacle.cause, obstacle.blocks) == ("learner.0", Cause.NO_ROOM, True)
    assert "10.0.0.1 has 1 of 1 CPUs" in obstacle.reason and "Add a node" in obstacle.reason
    assert not set(ranks) & set(inner_of(spread).running)
    nodes.append(Node("c", "10.0.0.3", cpus=1.0))
    spread.statuses(ranks, 1.0)
    assert [inner_of(spread).running[name] for name in ranks] == ["home", "c"]
    assert gather(spread.statuses(ranks, 1.0)) == []


def test_a_rank_whose_node_is_gone_before_it_starts_waits_as_aloud(
    spread: ClusterLauncher, nodes: list[Node]
) -> None:
    spread.kill("learner.1")
    nodes.remove(OTHER)
    spread.start(spec("learner.1", cpus=1.0))
    (obstacle,) = gather(spread.statuses(["learner.0", "learner.1"], 1.0))
    assert (obstacle.service, obstacle.cause) == ("learner.1", Cause.NO_ROOM)
