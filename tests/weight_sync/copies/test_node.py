"""Receivers of one node as real processes: who maps moves no byte, who is killed or stopped stops nobody."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.cluster import (
    HASTY,
    Child,
    Cluster,
    Fault,
    check,
    load,
    model,
    report_loaded,
    running_cluster,
    take,
    wait_until,
)
from weight_sync.memory import segments
from weight_sync.publisher_client import PublisherClient
from weight_sync.sync_records import JOURNAL_FILE, RoundRecord, parse_entry

NAMES = ("receiver.0", "receiver.1", "receiver.2")


class FlipOnce:
    """Flips a bit of the first bucket that comes."""

    def __init__(self) -> None:
        self.is_done = False

    def __call__(self, number: int, bucket: int, data: torch.Tensor) -> None:
        if not self.is_done:
            self.is_done = True
            data[7] ^= 1


def two_nodes(name: str) -> str:
    return "a" if name.startswith("publisher") else "b"


def start(cluster: Cluster, *names: str) -> list[Child]:
    children = [cluster.start(name) for name in names]
    cluster.wait_for_members(*names)
    return children


def publish(publisher_client: PublisherClient, number: int) -> None:
    assert publisher_client.publish(PolicyVersion(number, number - 1), model(number))


def counters(cluster: Cluster) -> dict[str, int]:
    return dict(cluster.coordinator.status().counters)


def rounds(folder: Path, number: int) -> list[RoundRecord]:
    entries = map(parse_entry, (folder / JOURNAL_FILE).read_bytes().splitlines())
    return [one for one in entries if isinstance(one, RoundRecord) and one.number == number]


def mapped_from(cluster: Cluster) -> dict[str, str]:
    return {name: member.mapped_from for name, member in cluster.members().items()}


def test_receivers_that_see_the_publishers_memory_map_every_version(tmp_path):
    """They find out by the mark in the run's folder; here nobody tells them."""
    with running_cluster(parallelism=4, node_of=lambda _: None) as cluster:
        receivers = start(cluster, *NAMES)
        publisher_client = cluster.publisher_client()
        for number in (1, 2, 3, 4):
            publish(publisher_client, number)
            assert [load(one, number - 1).number for one in receivers] == [number] * 3
        found, size = counters(cluster), cluster.coordinator.status().num_bytes
        assert (found["bytes_mapped"], found.get("bytes_copied", 0), found.get("bytes_sent", 0)) == (
            12 * size,
            0,
            0,
        )
        assert set(mapped_from(cluster).values()) == {"publisher"} and not found.get("rounds_failed")
        publishers = segments.find(f"{cluster.shm_prefix}publisher-t1-")
        assert len(publishers) <= 3, "segments were written to again once nobody read them"
        assert (segments.SHM_DIR / cluster.shm_prefix).stat().st_mode & 0o077 == 0


def test_one_receiver_of_a_node_gets_the_bytes_and_if_it_is_killed_another_takes_over(tmp_path):
    with running_cluster(parallelism=4, node_of=two_nodes, socket_dir=tmp_path, **HASTY) as cluster:
        cluster.start("receiver.0", fault=Fault("kill", 2, 2))
        receivers = [cluster.children["receiver.0"], *start(cluster, *NAMES[1:])]
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        assert [load(one).number for one in receivers] == [1, 1, 1]
        assert mapped_from(cluster) == dict(zip(NAMES, ["", "receiver.0", "receiver.0"], strict=True))
        publish(publisher_client, 2)
        assert [load(one, 1).number for one in receivers[1:]] == [2, 2]
        assert mapped_from(cluster)["receiver.2"] == "receiver.1"
        cluster.children["receiver.0"].kill()
        again = cluster.start("receiver.0")
        assert load(again).number == 2
        assert mapped_from(cluster)["receiver.0"] == "receiver.1", "it maps what its node has"
        (last,) = (one for one in rounds(tmp_path, 2) if "receiver.1" in one.parts and not one.holder)
        assert last.parts == {"receiver.1": "VERIFIED"} and not last.cause


@pytest.mark.long
@pytest.mark.parametrize("phase", [0, 2])
def test_a_receiver_that_is_killed_while_it_maps_keeps_nothing(phase, tmp_path):
    with running_cluster(parallelism=4, node_of=lambda _: "n", socket_dir=tmp_path, **HASTY) as cluster:
        cluster.start("receiver.0", fault=Fault("kill", 2, phase))
        (other,) = start(cluster, "receiver.1")
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        assert [load(one).number for one in (cluster.children["receiver.0"], other)] == [1, 1]
        publish(publisher_client, 2)
        assert load(other, 1).number == 2
        wait_until(lambda: not cluster.children["receiver.0"].process.is_alive(), "the fault to strike")
        for number in range(3, 8):
            publish(publisher_client, number)
            assert load(other, number - 1).number == number
        cluster.children["receiver.0"].kill()
        assert load(cluster.start("receiver.0")).number == 7
        assert len(segments.find(f"{cluster.shm_prefix}publisher-t1-")) <= 3


@pytest.mark.long
def test_the_learner_publishes_on_while_a_replica_stands_still_with_a_copy_that_it_has_mapped(tmp_path):
    """What it reads stays as it was, for as long as it reads."""
    with running_cluster(parallelism=4, node_of=lambda _: "n", socket_dir=tmp_path, **HASTY) as cluster:
        slow, other = start(cluster, "receiver.0", "receiver.1")
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        staged = take(slow)
        assert staged is not None and load(other).number == 1
        slow.signal(signal.SIGSTOP)
        for number in range(2, 9):
            publish(publisher_client, number)
            assert load(other, number - 1).number == number
        check(staged)
        slow.signal(signal.SIGCONT)
        report_loaded(slow, 1)
        wait_until(lambda: load(slow, 1).number == 8, "it to catch up")
        assert publisher_client.num_absences == 0


@pytest.mark.long
@pytest.mark.parametrize("node_of", [lambda _: "n", two_nodes], ids=["mapped", "shared"])
def test_what_is_mapped_is_loaded_though_its_publisher_or_holder_is_killed(
    node_of: Callable[[str], str], tmp_path: Path
) -> None:
    victim = "publisher.0" if node_of("publisher.0") == "n" else "receiver.0"
    with running_cluster(parallelism=4, node_of=node_of, socket_dir=tmp_path, **HASTY) as cluster:
        receivers = start(cluster, *NAMES)
        publish(cluster.publisher_client(), 1)
        staged = [take(one) for one in receivers]
        cluster.children[victim].kill()
        own = "publisher-" if victim == "publisher.0" else f"{victim}-"
        segments.unlink_all(f"{cluster.shm_prefix}{own}")  # as the control plane does
        for one, copy in zip(receivers, staged, strict=True):
            if one is not cluster.children[victim]:
                assert copy is not None
                check(copy)
                report_loaded(one, 1)


def test_a_receiver_whose_mapped_bytes_are_wrong_gets_them_by_a_transfer(tmp_path):
    with running_cluster(parallelism=4, node_of=lambda _: "n", socket_dir=tmp_path) as cluster:
        receiver = cluster.start("receiver.0", fault=FlipOnce())
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        assert load(receiver).number == 1
        publish(publisher_client, 2)
        assert load(receiver, 1).number == 2
        first, second, third = (one for number in (1, 2) for one in rounds(tmp_path, number))
        assert (first.holder, first.cause) == ("publisher", "digest")
        assert (second.holder, second.parts) == ("", {"receiver.0": "VERIFIED"})
        assert (third.holder, third.parts) == ("publisher", {"receiver.0": "VERIFIED"})
        assert counters(cluster)["maps_failed"] == 1 and not cluster.coordinator.status().culprit
