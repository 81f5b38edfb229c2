"""Versions that several publishers send to receivers, each its stripe: real processes and transfers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.staleness import PolicyVersion
from learner.striped import StripedPublish
from tests.learner.nodes.test_striped_publish import Model
from tests.weight_sync.cluster import HASTY, Cluster, load, running_cluster, wait_until
from tests.weight_sync.memory.test_sharded_publish import ThreadMeeting
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.publisher_client import PublisherClient

BUCKET_BYTES = 1000


class Learner:
    """One rank that writes all stripes."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self._cluster, self._clients = cluster, list[PublisherClient]()
        self._alone = ThreadMeeting(0, 1, threading.Barrier(1), {})
        stripes = [Stripe(index, count) for index in range(count)]
        self._striped = StripedPublish(self._connect, stripes, self._alone, BUCKET_BYTES)

    def _connect(self, token: int, stripe: Stripe) -> PublisherClient:
        address = self._cluster.children[f"publisher.{stripe.index}"].address
        where = (ThreadRuntime(), address, self._cluster.shm_prefix)
        self._clients.append(PublisherClient(*where, BUCKET_BYTES, token, stripe=stripe))
        return self._clients[-1]

    def publish(self, number: int) -> None:
        exporter = Model(number, self._alone)
        wait_until(lambda: self._striped.has_room(1, None, exporter), "room at every publisher")
        assert self._striped.publish(PolicyVersion(number, number), exporter)

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextlib.contextmanager
def publishing(count: int, socket_dir: Path | None = None, **how: Any) -> Iterator[tuple[Cluster, Learner]]:
    names = ["weight_sync.0", *(f"publisher.{index}" for index in range(count))]
    settings = HASTY | {"services": names, "num_stripes": count, "socket_dir": socket_dir, "parallelism": 4}
    with running_cluster(**settings | how) as cluster, contextlib.closing(Learner(cluster, count)) as learner:
        yield cluster, learner


@pytest.mark.parametrize(
    ("count", "encoding", "has_folder"),
    [(2, "full", False), (3, "full", False), (3, "delta", False), (2, "delta", True)],
)
def test_replicas_get_each_version_from_all_publishers(
    count: int, encoding: str, has_folder: bool, tmp_path: Path
) -> None:
    folder = f"file://{tmp_path}" if has_folder else None
    with publishing(count, encoding=encoding, folder=folder) as (cluster, learner):
        for name in ("receiver.0", "receiver.1"):
            cluster.start(name, by_folder=has_folder)
        served = {"receiver.0": 0, "receiver.1": 0}
        for number in (1, 2, 3):
            learner.publish(number)
            for name, before in served.items():
                served[name] = load(cluster.children[name], before).number
            assert set(served.values()) == {number}
        told = [cluster.children[f"publisher.{index}"].status() for index in range(count)]
        assert all(one.counters["transfers"] for one in told), "each has sent"
        assert cluster.coordinator.status().counters.get("culprits", 0) == 0


def test_the_successor_of_a_publisher_that_dies_while_it_sends_finishes_its_stripe(tmp_path: Path) -> None:
    """Nobody publishes again."""
    with publishing(2, tmp_path) as (cluster, learner):
        receiver = cluster.start("receiver.0")
        learner.publish(1)
        assert load(receiver).number == 1
        victim = cluster.children["publisher.1"]
        victim.arm("publisher.bucket@2.0")
        learner.publish(2)
        wait_until(lambda: not victim.process.is_alive(), "its end")
        victim.kill()
        assert cluster.start("publisher.1").status().version == (2, 2)
        assert load(receiver, 1).number == 2
        assert cluster.publisher.status().counters.get("failed_transfers", 0) == 0
