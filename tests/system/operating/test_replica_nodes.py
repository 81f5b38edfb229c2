"""A replica whose engine has its workers on two Ray nodes, and the death of one of them in mid-generation.

Three Ray nodes on this machine. The real vLLM, tensor-parallel over gloo on CPU. The nodes have a
`/dev/shm` of their own where this user may give them one, so that each version must be sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.parts.ray_node import MEMORY_BYTES, RayNode, addresses_of, end_and_verify, events_of
from tests.system.parts.up_run import UpRun

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
STEP_S = 500.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Home with room for the learner alone."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": MEMORY_BYTES, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    yield found
    found.shutdown()


@pytest.fixture
def start_node(cluster: Any, runs_dir: Path) -> Iterator[Callable[[str, str, int], RayNode]]:
    """Return a function that starts the node at an address for a run of that name."""
    started: list[RayNode] = []

    def start(ip: str, name: str, count: int) -> RayNode:
        started.append(RayNode.joined(cluster.address, ip, runs_dir / name, count))
        return started[-1]

    yield start
    for node in started:
        node.end()


@pytest.mark.parametrize("lost", [FIRST, SECOND])
def test_a_replica_over_two_nodes_follows_versions_and_the_death_of_a_node_ends_it_whole(
    lost: str,
    cluster: Any,
    start_node: Callable[[str, str, int], RayNode],
    up: Callable[..., UpRun],
) -> None:
    name = f"replica_{lost[-1]}"
    nodes = {ip: start_node(ip, name, count) for count, ip in enumerate((FIRST, SECOND), start=2)}
    run = up(
        name,
        f"launcher.ray={cluster.address}",
        "learner.steps=5000",
        "rollout.replicas=1",
        "rollout.cpus=2",
        "rollout.engine_args={nnodes: 2}",
        "eval.every_steps=0",
        "weight_sync.probe_every=1",
        "launcher.start_deadline_s=900",
    )
    status = run.wait_for(lambda found: found["step"] >= 5, deadline_s=STEP_S)
    places = addresses_of(cluster.address, status)
    assert places["rollout.0"] == f"{FIRST},{SECOND}" and places["receiver.0"] == FIRST
    assert len(status["services"]["rollout.0"]["node"].split(",")) == 2

    nodes[lost].kill_raylet()
    waiting = run.wait_for(
        lambda found: found["services"]["rollout.0"]["state"] == "WAITING", deadline_s=STEP_S
    )
    told = events_of(run)
    assert any(f"the node {lost}" in text and "with it" in text and "rollout.0" in text for text in told), (
        told
    )
    supervisor = (run.folder / "logs" / "supervisor.0.log").read_text()
    assert "rollout.0 waits: no 2 nodes have room for rollout.0" in supervisor
    assert waiting["ledger"]["residue"] == 0

    nodes[lost].end()
    start_node(lost, name, 3)
    reached = waiting["step"]
    later = run.wait_for(lambda found: found["step"] > reached + 3, deadline_s=STEP_S)
    assert later["ledger"]["residue"] == 0
    end_and_verify(run)
