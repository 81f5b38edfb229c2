"""A learner over two Ray nodes with a replica on a third, and the death of one of them in mid-step.

Three Ray nodes on this machine, of which the learner's second one can be killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.parts.ray_node import (
    CAN_MOUNT,
    MEMORY_BYTES,
    RayNode,
    addresses_of,
    end_and_verify,
    events_of,
    obstacles_of,
)
from tests.system.parts.up_run import UpRun

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

SECOND = "127.0.0.2"
STEP_S = 400.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Home with room for one rank, and a node with room for one replica."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": MEMORY_BYTES, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    found.add_node(num_cpus=1, object_store_memory=MEMORY_BYTES, node_ip_address="127.0.0.3")
    yield found
    found.shutdown()


@pytest.fixture
def second_node(cluster: Any, runs_dir: Path) -> Iterator[Callable[..., RayNode]]:
    """Return a function that starts the node for a run of that name; a fault is for the services on it."""
    started: list[RayNode] = []

    def start(name: str, fault: str = "") -> RayNode:
        started.append(RayNode.joined(cluster.address, SECOND, runs_dir / name, 3, fault))
        return started[-1]

    yield start
    for node in started:
        node.end()


@pytest.mark.parametrize("layout", ["tp", "dp"])
def test_a_learner_over_two_nodes_outlives_the_death_of_one_in_mid_step(
    layout: str, cluster: Any, second_node: Callable[[str], RayNode], up: Callable[..., UpRun]
) -> None:
    name = f"nodes_{layout}"
    node = second_node(name)
    run = up(
        name,
        f"launcher.ray={cluster.address}",
        f"learner.{layout}=2",
        "learner.steps=5000",
        "rollout.replicas=1",
        "rollout.cpus=1",
        "eval.every_steps=0",
        "checkpoint.every_steps=2",
        "weight_sync.probe_every=1",
    )
    status = run.wait_for(lambda found: found["step"] >= 5, deadline_s=STEP_S)
    places = addresses_of(cluster.address, status)
    assert places["learner.1"] == SECOND and places["rollout.0"] == places["receiver.0"] == "127.0.0.3"
    home = {name for name in places if places[name] not in (SECOND, "127.0.0.3")}
    assert {"buffer.0", "weight_sync.0", "publisher.0", "learner.0"} <= home
    assert places["publisher.1"] == SECOND
    log = (run.folder / "logs" / "learner.0.log").read_text()
    if CAN_MOUNT:
        assert "learner ranks [1] do not see rank 0's" in log

    node.kill_raylet()
    waiting = run.wait_for(lambda found: ("learner.0", "no_room") in obstacles_of(found), deadline_s=120.0)
    assert waiting["health"] == "degraded"
    states = {name: waiting["services"][name]["state"] for name in ("learner.0", "learner.1")}
    assert set(states.values()) == {"WAITING"}
    named = [text for text in events_of(run) if f"the node {SECOND}" in text]
    assert named and "with it learner.1" in named[0] and "add another" in named[0], events_of(run)
    assert any("the learner's 2 ranks" in text and "Add a node" in text for text in events_of(run))

    node.end()
    second_node(name)
    reached = waiting["step"]
    run.wait_for(lambda found: found["step"] > reached + 3, deadline_s=STEP_S)
    assert "resumed at step" in (run.folder / "logs" / "learner.0.log").read_text()
    later = run.wait_for(lambda found: not obstacles_of(found), deadline_s=60.0)
    assert later["ledger"]["residue"] == 0
    end_and_verify(run)


def test_a_publisher_that_dies_while_it_sends_its_stripe_is_started_again_alone(
    cluster: Any, second_node: Callable[..., RayNode], up: Callable[..., UpRun]
) -> None:
    """On the learner's second node, at the first bucket of its stripe of version 4."""
    second_node("stripes", "publisher.bucket@4.0")
    run = up(
        "stripes",
        f"launcher.ray={cluster.address}",
        "learner.dp=2",
        "learner.steps=5000",
        "rollout.replicas=1",
        "rollout.cpus=1",
        "eval.every_steps=0",
        "weight_sync.bucket_bytes=65536",
        "weight_sync.probe_every=1",
    )
    run.wait_for(lambda found: found["step"] >= 5, deadline_s=STEP_S)
    again = run.wait_for(lambda found: found["services"]["publisher.1"].get("restarts"), deadline_s=120.0)
    status = run.wait_for(lambda found: found["step"] > again["step"] + 5, deadline_s=STEP_S)
    places = addresses_of(cluster.address, status)
    assert (places["publisher.1"], places["learner.1"]) == (SECOND, SECOND)
    assert places["publisher.0"] == places["learner.0"] != SECOND
    died = [text for text in events_of(run) if text.startswith("publisher.")]
    assert all("publisher.1" in text for text in died if "start" not in text), died
    restarts = {name: found.get("restarts", 0) for name, found in status["services"].items()}
    assert {name for name, count in restarts.items() if count} <= {"publisher.0", "publisher.1"}, restarts
    served = int(status["services"]["rollout.0"]["version"])
    run.wait_for(lambda found: int(found["services"]["rollout.0"]["version"]) > served + 2, deadline_s=STEP_S)
    assert status["ledger"]["residue"] == 0
    end_and_verify(run)
