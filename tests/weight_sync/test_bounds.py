"""Bounds on the resources that a holder of the run's keys can make weight sync take: those of the model."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import torch
from safetensors.torch import save_file

from asyncrl.core.errors import DeadlineExceeded, WireError
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.staleness import PolicyVersion
from asyncrl.planner.plan.footprint.shared_memory import SHM_DIR
from tests.weight_sync.cluster import Cluster, load, model, running_cluster, take, wait_until
from weight_sync.bounds import SPARE_BYTES
from weight_sync.memory.manifest import ANY_VERSION, Bucket, Manifest, TensorSpec, VersionBounds, plan

MAPS = b"\xdd" + struct.pack(">I", 1 << 20) + b"\x80" * (1 << 20)
"""An array of a million empty maps: 72 MB once read."""
PUBLISHER_INFO = {"store_host": "127.0.0.1", "store_port": 9}


def manifest_of(num_bytes: int, number: int = 1) -> Manifest:
    layout = plan([TensorSpec("w", "uint8", (num_bytes,))], 1 << 30)
    sizes = [min(1 << 30, num_bytes - start) for start in range(0, num_bytes, 1 << 30)]
    return Manifest(PolicyVersion(number, 0), layout, tuple(Bucket(size, "0" * 32) for size in sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_file(dict(model(1)), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with running_cluster(services=()) as started:
        started.set_model(folder)
        for name in ("weight_sync.0", "publisher.0", "receiver.0"):
            started.start(name)
        started.wait_for_members("receiver.0")
        yield started


def shared_bytes(cluster: Cluster) -> int:
    return sum(path.stat().st_blocks * 512 for path in SHM_DIR.glob(f"{cluster.shm_prefix}*"))


REFUSED_MANIFESTS = {
    "length 2, got 1": msgpack.packb({"version": [[[[[[[[1]]]]]]]]}),
    "Expected `array`, got `ext`": msgpack.packb({"version": msgpack.Timestamp(1, 1)}),
    "Expected `object`, got `array`": b"\xdd" + struct.pack(">I", 1 << 18) + b"\xc0" * (1 << 18),
    "is over the limit of 4096": b"\x90" * 5000,
}


@pytest.mark.parametrize("why", REFUSED_MANIFESTS)
def test_a_manifest_is_read_within_limits(why: str) -> None:
    limit = 4096 if "4096" in why else ANY_VERSION.manifest_bytes
    with pytest.raises(WireError, match=why):
        Manifest.from_bytes(REFUSED_MANIFESTS[why], bounds=VersionBounds(manifest_bytes=limit))


def test_a_manifest_of_more_than_the_model_takes_is_refused() -> None:
    assert Manifest.from_bytes(manifest_of(1024).to_bytes(), bounds=VersionBounds(1024))
    with pytest.raises(WireError, match="takes up to 1024"):
        Manifest.from_bytes(manifest_of(1088).to_bytes(), bounds=VersionBounds(1024))


@pytest.mark.parametrize("num_bytes", [3 << 30, -1, (1 << 64) - 1])
def test_the_publisher_reserves_nothing_that_the_model_does_not_take(
    cluster: Cluster, num_bytes: int
) -> None:
    before = shared_bytes(cluster)
    with pytest.raises(WireError, match=r"takes up to|num_bytes"):
        cluster.publisher.client.call("acquire", deadline_s=30.0, token=0, num_bytes=num_bytes)
    assert shared_bytes(cluster) == before


def test_a_false_publishers_manifest_is_refused_by_the_coordinator(cluster: Cluster) -> None:
    false = Client(ThreadRuntime(), cluster.coordinator.address)
    info = PUBLISHER_INFO | {"name": "publisher", "incarnation": "false", "started_ms": 0}
    for data in (manifest_of(2 << 30).to_bytes(), MAPS):
        with pytest.raises(WireError, match=r"manifest|takes up to"):
            false.call("publisher_hello", [data], deadline_s=30.0, **info)
    with pytest.raises((WireError, DeadlineExceeded)):  # over any limit: its connection ends
        false.call("publisher_hello", [bytes(24 << 20)], deadline_s=1.0, **info)
    false.close()


def test_a_receiver_takes_no_room_for_a_version_that_the_model_does_not_take(folder: Path) -> None:
    with running_cluster() as cluster:  # whose coordinator and publisher know no bounds
        cluster.set_model(folder)
        receiver = cluster.start("receiver.0")
        cluster.wait_for_members("receiver.0")
        weights = [("w", torch.zeros(SPARE_BYTES + (1 << 20), dtype=torch.uint8))]
        assert cluster.publisher_client().publish(PolicyVersion(1, 0), weights)
        assert take(receiver, wait_s=5.0) is None
        wait_until(lambda: bool(receiver.status().counters.get("refused_orders")), "the refusal")
        assert not list(SHM_DIR.glob(f"{cluster.shm_prefix}receiver*"))


def test_after_all_that_a_version_arrives(cluster: Cluster) -> None:
    assert cluster.publisher_client().publish(PolicyVersion(1, 0), model(1))
    assert load(cluster.children["receiver.0"]).number == 1
