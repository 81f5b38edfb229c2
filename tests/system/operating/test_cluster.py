"""Rollouts on other nodes of a Ray cluster: several Ray nodes on this machine, each with its own processes.

The addresses 127.0.0.2 and 127.0.0.3 stand for other machines. What they cannot show: a network between
them, another file system, and GPUs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.parts.up_run import UpRun, leftovers

ROOT = Path(__file__).parents[3]
SMALL = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, which is home, and two nodes that have room for two replicas each."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={**SMALL, "num_cpus": 2, "include_dashboard": False})
    for number in (2, 3):
        found.add_node(**SMALL, num_cpus=1, node_ip_address=f"127.0.0.{number}")
    yield found
    found.shutdown()


def node_of(pid: int) -> str:
    """Return the id of the node that a service's process was told to be on."""
    return psutil.Process(pid).environ()["ASYNCRL_NODE"]


def ready(status: dict[str, Any]) -> dict[str, int]:
    """Return the pids of the replicas that serve."""
    services = status.get("services", {})
    return {
        name: found["pid"]
        for name, found in services.items()
        if name.startswith("rollout.") and found.get("state") == "READY"
    }


def check_places(cluster: Any, status: dict[str, Any]) -> None:
    """Assert that two replicas are on a node each, with their receivers, and all else is at home."""
    ids = {node.node_ip_address: node.node_id for node in cluster.list_all_nodes()}
    places = {name: node_of(pid) for name, pid in ready(status).items()}
    assert set(places.values()) == {ids["127.0.0.2"], ids["127.0.0.3"]}
    for name, found in status["services"].items():
        kind, _, index = name.partition(".")
        expected = places[f"rollout.{index}"] if kind == "receiver" else cluster.head_node.node_id
        if kind != "rollout":
            assert node_of(found["pid"]) == expected, name


def start(cluster: Any, up: Callable[..., UpRun], name: str, *changes: str) -> tuple[UpRun, dict[str, Any]]:
    """Start a run and return it with its status once both replicas serve and a step is done."""
    run = up(name, f"launcher.ray={cluster.address}", "learner.steps=5000", "eval.every_steps=0", *changes)
    status = run.wait_for(lambda found: len(ready(found)) == 2 and found["step"] >= 1, deadline_s=400.0)
    check_places(cluster, status)
    assert (run.folder / "keys.json").stat().st_mode & 0o777 == 0o600
    return run, status


def end(run: UpRun) -> None:
    """Interrupt a run; every node must be clean after it."""
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    assert run.summary()["ledger_residue"] == 0
    assert leftovers(run.folder) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_engines_on_other_nodes_get_weights_and_train_the_learner_at_home(
    cluster: Any, up: Callable[..., UpRun]
) -> None:
    run, status = start(cluster, up, "engines")
    run.wait_for(lambda found: found["step"] >= status["step"] + 2, deadline_s=300.0)
    end(run)
    for name in ("rollout.0", "receiver.0", "rollout.1", "receiver.1"):
        assert (run.folder / "logs" / f"{name}.log").stat().st_size, name
    assert len(cluster.list_all_nodes()) == 3


@pytest.mark.long
@pytest.mark.timeout(900)
def test_replicas_on_other_nodes_come_and_go_while_the_run_trains(
    cluster: Any, up: Callable[..., UpRun]
) -> None:
    run, status = start(cluster, up, "spread", "rollout.engine=scripted")
    assert run.command("scale", "rollout=3").returncode == 0
    grown = run.wait_for(lambda found: len(ready(found)) == 3, deadline_s=300.0)
    # The others have one each, and home comes last.
    assert node_of(ready(grown)["rollout.2"]) == cluster.head_node.node_id
    assert run.command("scale", "rollout=1").returncode == 0
    shrunk = run.wait_for(lambda found: len(ready(found)) == 1, deadline_s=200.0)
    assert shrunk["state"] == "running" and shrunk["step"] >= status["step"]
    later = run.wait_for(lambda found: found["step"] > shrunk["step"], deadline_s=200.0)
    assert later["ledger"]["residue"] == 0
    end(run)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_with_other_code_is_named_before_anything_starts(
    cluster: Any, up: Callable[..., UpRun], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    for package in ("asyncrl", "learner", "rollout_service", "weight_sync"):
        shutil.copytree(ROOT / package, other / package)
    with (other / "asyncrl" / "core" / "wire.py").open("a") as file:
        file.write("# another version\n")
    node = cluster.add_node(
        **SMALL, num_cpus=1, node_ip_address="127.0.0.4", env_vars={"PYTHONPATH": str(other)}
    )
    try:
        # Ray has workers import from the driver's folder first, if it exists on their node.
        run = up("mixed", f"launcher.ray={cluster.address}", "learner.steps=1", cwd=tmp_path)
        code, output = run.finish()
    finally:
        cluster.remove_node(node)
    assert code == 1
    assert "node 127.0.0.4" in output and "asyncrl's source is" in output
    assert not (run.folder / "logs" / "buffer.0.log").exists()
