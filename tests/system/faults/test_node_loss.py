"""The buffer's node is lost: the service starts on another Ray node against the same Redis."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.control.ray.host import ServiceHost
from asyncrl.core.config.tree import Config
from asyncrl.core.experience import encode_group
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.status.service import BufferStatus
from asyncrl.core.status.statuses import read_status
from tests.buffer.parts import make_group

NUM_GROUPS = 20
PASSWORD = "PASSWORD_OF_REDIS"
"""The environment variable that holds it where the buffer runs."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and two small nodes on this machine, each with its own Ray processes."""
    import ray
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    found = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    ray.init(address=found.address, namespace="node_loss", logging_level="ERROR", log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    server.ensure()
    yield server
    server.stop()


def start_buffer(config: Config, folder: Path, node: str, password: str) -> str:
    """Start the buffer as the launcher does, on the node that has the resource `node`; return its address."""
    import ray

    options = {"num_cpus": 0, "max_concurrency": 8, "max_restarts": 0, "resources": {node: 1}}
    options |= {"runtime_env": {"env_vars": {PASSWORD: password}}}
    context = ServiceContext(config, "buffer.0", folder, "id")
    host = ray.remote(ServiceHost).options(**options, name=f"buffer-{node}", lifetime="detached")
    actor = host.remote("asyncrl.buffer.composition:build", context, str(folder / f"{node}.log"))
    end = time.monotonic() + 60.0
    while True:
        status = read_status("buffer", ray.get(actor.status.remote(), timeout=60.0))
        if isinstance(status, BufferStatus) and status.state == "READY":
            return status.address
        assert status.state == "STARTING" and time.monotonic() < end, status
        time.sleep(0.05)


def push_groups(client: Client, version: int) -> dict[int, list[bytes]]:
    """Push groups; return those that the buffer acknowledged."""
    acknowledged = {}
    lease = client.call("lease", replica="a", version=version, want=NUM_GROUPS, wait_s=0.0).args
    for grant in lease["grants"]:
        frames = encode_group(make_group(grant["ticket"], grant["attempt"], version))
        named = {"replica": "a", "ticket": grant["ticket"], "attempt": grant["attempt"]}
        assert client.call("push", frames, **named).args["result"] == "stored"
        acknowledged[grant["ticket"]] = frames
    return acknowledged


@pytest.mark.long
def test_the_buffer_goes_on_at_another_node_with_every_acknowledged_group(
    cluster: Any, redis_server: RedisServer, tmp_path: Path
) -> None:
    first = cluster.add_node(num_cpus=1, resources={"first": 1}, object_store_memory=80 << 20)
    cluster.add_node(num_cpus=1, resources={"second": 1}, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    password = urlsplit(redis_server.url).password or ""
    url = redis_server.url.replace(password, f"${{{PASSWORD}}}")
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "reward": {"fn": "f"},
            "rollout": {"group_size": 2},
            "learner": {"groups_per_step": 4, "minibatches": 1},
            "staleness": {"max_lag": 4, "ready_batches": 5},
            "buffer": {"journal": "redis", "url": url},
        }
    )
    client = Client(ThreadRuntime(), start_buffer(config, tmp_path, "first", password))
    client.call("describe_data", num_prompts=100, digest="digest")
    token = client.call("open", holder="learner").args["token"]
    version = client.call("register_version", token=token, step=0).args["number"]
    acknowledged = push_groups(client, version)
    assert len(acknowledged) == NUM_GROUPS
    client.close()
    cluster.remove_node(first, allow_graceful=False)
    began = time.monotonic()
    address = start_buffer(config, tmp_path, "second", password)
    print(f"serving on another node after {time.monotonic() - began:.1f} s")
    with contextlib.closing(LearnerClient(address, token=token)) as learner:
        status = learner.status()
        assert (status.stored_groups, status.residue) == (NUM_GROUPS, 0)
        found: dict[int, list[Any]] = {}
        for step in range(NUM_GROUPS // 4):
            batch = learner.reserve(step, 10.0)
            assert batch is not None
            for group in learner.fetch([row.ticket for row in batch.tickets]):
                found[group.ticket] = encode_group(group)
            learner.trained(step)
            learner.register_version(step + 1)
        assert found == acknowledged
        assert learner.status().residue == 0
