"""The real vLLM with workers on two Ray nodes of this machine, on CPU: versions in flight, lost workers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from asyncrl.core.errors import EngineError
from rollout_service.engine.protocol import EngineDied, Sampling
from rollout_service.engine.vllm.engine import VllmEngine
from tests.rollout.engine.engine_parts import LoopThread, make_model, save_model
from tests.rollout.replica.flight_parts import Flight, settings_for, until_under_way

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SECOND, MEMORY_BYTES = "127.0.0.2", 80 << 20
NUM_VERSIONS = 4


@dataclass(frozen=True)
class OtherNode:
    """The node with the further workers."""

    id: str
    raylet: psutil.Process

    def peers(self) -> list[psutil.Process]:
        """Return the processes of its actors."""
        return [one for one in self.raylet.children() if " ".join(one.cmdline()).startswith("ray::Peer")]


@pytest.fixture(scope="module")
def second_node() -> Iterator[OtherNode]:
    """Join a cluster of two nodes, and return the other one."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": MEMORY_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY_BYTES, node_ip_address=SECOND)
    ray.init(address=cluster.address, log_to_driver=False)
    yield OtherNode(node.node_id, psutil.Process(node.all_processes["raylet"][0].process.pid))
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    found = LoopThread()
    yield found
    found.close()


def engine_over(node: str, tmp_path: Path) -> VllmEngine:
    folder = str(save_model(make_model(0), tmp_path))
    return VllmEngine(settings_for(folder, cpu_workers=2, further_nodes=(node,), num_cpus=1.0))


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30.0)
    assert alive == []


def test_every_token_of_workers_on_two_nodes_is_of_the_version_that_it_names(
    second_node: OtherNode, loop: LoopThread, tmp_path: Path
) -> None:
    """Log-probs are compared with those of Hugging Face's model of that version."""
    engine = engine_over(second_node.id, tmp_path)
    try:
        loop.call(engine.start(), 400.0)
        (peer,) = second_node.peers()
        workers = peer.children(recursive=True)
        assert any(
            "Worker" in " ".join(one.cmdline()) or "spawn" in " ".join(one.cmdline()) for one in workers
        )
        flight = Flight(engine, {0: make_model(0)})
        loop.call(flight.through(NUM_VERSIONS), 300.0)
    finally:
        loop.call(engine.shutdown())
    wait_until_gone([peer, *workers])
    flight.check_spans()
    assert flight.check_logprobs() > 5000
    assert sorted(flight.greedy) == list(range(1 + NUM_VERSIONS))
    flight.check_greedy()


def test_an_engine_whose_workers_on_another_node_are_killed_dies_and_says_so(
    second_node: OtherNode, loop: LoopThread, tmp_path: Path
) -> None:
    engine = engine_over(second_node.id, tmp_path)

    async def answer() -> None:
        await engine.generate([1, 2], Sampling(1.0, 900, 0, ignores_eos=True), "long")

    async def killed_in_flight() -> None:
        under_way = asyncio.create_task(answer())
        await until_under_way(engine, 0)
        os.kill(peer.pid, signal.SIGKILL)
        await under_way

    try:
        loop.call(engine.start(), 400.0)
        (peer,) = second_node.peers()
        here, there = engine.child_pids(), peer.children(recursive=True)
        with pytest.raises(EngineDied, match="vLLM died"):
            loop.call(killed_in_flight(), 200.0)
        wait_until_gone(there)
        wait_until_gone([psutil.Process(pid) for pid in here if psutil.pid_exists(pid)])
        assert "the workers on node 2 of the replica are gone" in str(engine.death())
    finally:
        loop.call(engine.shutdown())


def test_a_start_whose_workers_on_another_node_are_killed_fails_at_once(
    second_node: OtherNode, loop: LoopThread, tmp_path: Path
) -> None:
    engine = engine_over(second_node.id, tmp_path)

    def kill_peer() -> None:
        while not (found := second_node.peers()):
            time.sleep(0.05)
        os.kill(found[0].pid, signal.SIGKILL)

    threading.Thread(target=kill_peer, daemon=True).start()
    try:
        with pytest.raises(EngineError, match="the workers on node 2 of the replica are gone"):
            loop.call(engine.start(), 400.0)
    finally:
        loop.call(engine.shutdown())
