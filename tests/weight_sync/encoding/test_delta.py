"""Versions as differences, through the real services over gloo: exact, and whole wherever that is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.core.sockets.keys import make_run_keys
from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.cluster import (
    Child,
    Cluster,
    Fault,
    report_loaded,
    running_cluster,
    take,
    wait_until,
)
from weight_sync.memory import segments
from weight_sync.memory.staging import open_tensors

NUM_ELEMENTS = 20_000
SHARE = 0.03


def weights(number: int) -> list[tuple[str, torch.Tensor]]:
    """Version `number`: 3 % of `large` change from version to version, `all` everywhere, `none` nowhere."""
    large = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    for step in range(1, number):
        generator = torch.Generator().manual_seed(step)
        large[torch.rand(NUM_ELEMENTS, generator=generator) < SHARE] += 1
    generator = torch.Generator().manual_seed(100 + number)
    return [("large", large), ("all", torch.randn(2048, generator=generator)), ("none", torch.ones(4000))]


NUM_BYTES = 40_000 + 8_192 + 16_000
NUM_DELTAS = 15
"""Of 16 buckets all but the one in which everything changes."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """With keys, so that each head and each difference has a tag. Two replicas may load at once: one that
    had to wait for the other, which the test has load after it, would do so until the other's deadline."""
    with running_cluster(encoding="delta", keys=make_run_keys(), parallelism=2) as started:
        yield started


class Follower:
    """A receiver and its replica."""

    def __init__(self, cluster: Cluster, name: str, **kwargs) -> None:
        self.receiver: Child = cluster.start(name, **kwargs)
        cluster.wait_for_members(name)
        self.serving = 0

    def load(self) -> int:
        """Load the next version, which must be the learner's bit by bit; return its number."""
        staged = take(self.receiver, self.serving)
        assert staged is not None, "nothing was staged in time"
        self.serving = staged.version.number
        for (name, found), (_, wanted) in zip(open_tensors(staged), weights(self.serving), strict=True):
            assert torch.equal(found, wanted), name
        report_loaded(self.receiver, self.serving)
        return self.serving


class Learner:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._publisher_client = cluster.publisher_client()
        self._seen = {"bytes_sent": 0, "deltas": 0}

    def publish(self, number: int) -> None:
        assert self._publisher_client.publish(PolicyVersion(number, number), weights(number))

    def sent(self, num_transfers: int) -> tuple[int, int]:
        """Wait for that many transfers in all; return bytes and differences sent since the last call."""
        coordinator, publisher = self._cluster.coordinator, self._cluster.publisher

        def is_over() -> bool:
            return publisher.status().counters.get("transfers", 0) >= num_transfers

        wait_until(is_over, f"{num_transfers} transfers")
        wait_until(lambda: coordinator.status().round is None, "the round to be closed")
        counters = publisher.status().counters | coordinator.status().counters
        before, self._seen = self._seen, {name: counters.get(name, 0) for name in self._seen}
        return self._seen["bytes_sent"] - before["bytes_sent"], self._seen["deltas"] - before["deltas"]


def test_the_first_version_goes_whole_and_the_next_ones_as_differences(cluster):
    follower, learner = Follower(cluster, "receiver.0"), Learner(cluster)
    learner.publish(1)
    assert follower.load() == 1
    assert learner.sent(1) == (NUM_BYTES, 0)
    for number in (2, 3, 4):
        learner.publish(number)
        assert follower.load() == number
        num_bytes, num_deltas = learner.sent(number)
        assert num_deltas == NUM_DELTAS
        assert 8_192 < num_bytes < 12_500


def test_a_joiner_gets_everything_and_then_differences_like_the_others(cluster):
    first, learner = Follower(cluster, "receiver.0"), Learner(cluster)
    for number in (1, 2):
        learner.publish(number)
        assert first.load() == number
    learner.sent(2)
    joiner = Follower(cluster, "receiver.1")
    assert joiner.load() == 2
    assert learner.sent(3) == (NUM_BYTES, 0)
    learner.publish(3)
    assert first.load() == joiner.load() == 3
    assert learner.sent(4)[1] == NUM_DELTAS


@pytest.mark.long
def test_who_has_missed_versions_gets_everything(cluster):
    """The base of one that was pinned is gone from the publisher, which then sends whole buckets."""
    first, second, learner = (
        Follower(cluster, "receiver.0"),
        Follower(cluster, "receiver.1"),
        Learner(cluster),
    )
    learner.publish(1)
    assert first.load() == second.load() == 1
    second.receiver.client.call("pin", deadline_s=60.0)
    wait_until(lambda: cluster.members()["receiver.1"].state == "PINNED", "the pin")
    for number in range(2, 7):
        learner.publish(number)
        assert first.load() == number
    learner.sent(6)
    second.receiver.client.call("unpin", deadline_s=60.0)
    assert second.load() == 6
    num_bytes, num_deltas = learner.sent(7)
    assert num_bytes >= NUM_BYTES and num_deltas == 0
    learner.publish(7)
    assert first.load() == second.load() == 7
    assert learner.sent(8)[1] == NUM_DELTAS


def test_a_wrong_difference_is_refused_and_everything_follows(cluster):
    """The publisher's base is turned into the new version: nothing differs, so nothing is sent."""
    follower, learner = Follower(cluster, "receiver.0"), Learner(cluster)
    learner.publish(1)
    assert follower.load() == 1
    learner.sent(1)
    image = weights(2)[0][1].view(torch.uint8).numpy().tobytes()
    for path in segments.find(f"{cluster.shm_prefix}publisher-t1-"):
        with Path(path).open("r+b") as file:
            file.write(image)
    learner.publish(2)
    assert follower.load() == 2
    num_bytes, _ = learner.sent(3)
    assert num_bytes > NUM_BYTES, "what was refused, and everything"
    assert follower.receiver.status().counters["failed/digest"] == 1


def test_a_byte_that_flips_on_its_way_never_reaches_the_engine_and_costs_the_base(cluster):
    follower = Follower(cluster, "receiver.0", fault=Fault("flip", number=2, bucket=3))
    learner = Learner(cluster)
    learner.publish(1)
    assert follower.load() == 1
    learner.publish(2)
    wait_until(lambda: follower.receiver.status().counters.get("failed/digest", 0) >= 1, "the mismatch")
    learner.publish(3)
    assert follower.load() == 3


def test_a_base_that_is_laid_out_otherwise_is_none(cluster):
    """Another learner with another model: nothing can be told as a difference."""
    follower, learner = Follower(cluster, "receiver.0"), Learner(cluster)
    learner.publish(1)
    assert follower.load() == 1
    other = torch.arange(30_000)
    assert cluster.publisher_client(token=2).publish(PolicyVersion(2, 2), [("other", other)])
    staged = take(follower.receiver, serving=1)
    assert staged is not None and staged.version.number == 2
    assert torch.equal(dict(open_tensors(staged))["other"], other)
    assert learner.sent(2)[1] == 0
