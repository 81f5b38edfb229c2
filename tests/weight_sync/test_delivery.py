"""Versions on their way from a learner to replicas, through real processes and gloo."""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from asyncrl.core.errors import FencedError
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.staleness import PolicyVersion
from asyncrl.planner.plan.footprint.shared_memory import NUM_AT_PUBLISHER, NUM_AT_RECEIVER
from tests.weight_sync.cluster import (
    HASTY,
    TIMING,
    WAIT_S,
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
from tests.weight_sync.faults.traces import num_segments, state_of
from weight_sync.link import ReceiverLink
from weight_sync.memory import segments
from weight_sync.memory.manifest import Probe
from weight_sync.memory.staging import open_tensors
from weight_sync.protocol.protocol import PUBLISHER
from weight_sync.publisher_client import PublisherClient


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(parallelism=4) as started:
        yield started


@pytest.fixture
def hasty_cluster() -> Iterator[Cluster]:
    with running_cluster(parallelism=4, **HASTY) as started:
        yield started


def start(cluster: Cluster, *names: str, **kwargs: object) -> list[Child]:
    children = [cluster.start(name, **kwargs) for name in names]  # type: ignore[arg-type]
    cluster.wait_for_members(*names)
    return children


def publish(publisher_client: PublisherClient, number: int) -> None:
    assert publisher_client.publish(PolicyVersion(number, number - 1), model(number))


def wait_for_counter(cluster: Cluster, name: str, value: int) -> None:
    wait_until(lambda: counter(cluster, name) == value, f"the counter {name} to be {value}")


def follow(receiver: Child, serving: int, newest: int) -> None:
    """Load what comes until it is `newest`; versions between may be skipped, never repeated."""
    while serving != newest:
        number = load(receiver, serving).number
        assert serving < number <= newest
        serving = number


def counter(cluster: Cluster, name: str) -> int:
    return int(cluster.coordinator.status().counters.get(name, 0))


def wait_for_state(cluster: Cluster, name: str, state: str) -> None:
    wait_until(lambda: cluster.members()[name].state == state, f"{name} to be {state}")


def test_every_version_arrives_whole_and_groups_are_reused(cluster):
    first, second = start(cluster, "receiver.0", "receiver.1")
    publisher_client = cluster.publisher_client()
    for number in (1, 2, 3):
        publish(publisher_client, number)
        assert load(first, number - 1).number == load(second, number - 1).number == number
    wait_for_state(cluster, "receiver.0", "READY")
    assert counter(cluster, "rounds_failed") == 0
    assert max(bucket for entry in take_layout(first) for bucket, _, _ in entry) >= 2


def take_layout(receiver: Child) -> list[list[tuple[int, int, int]]]:
    """Return the pieces of each tensor of the version that the receiver hands to a fresh replica."""
    staged = take(receiver, 0)
    assert staged is not None
    return [staged.manifest.layout.pieces(entry) for entry in staged.manifest.tensors]


def test_a_replica_follows_through_its_link_and_the_probe_arrives(cluster):
    (receiver,) = start(cluster, "receiver.0")
    probe = Probe((5, 6, 7), (-0.5, -0.25), 3)
    assert cluster.publisher_client().publish(PolicyVersion(1, 0), model(1), probe)

    async def load_once() -> None:
        link = ReceiverLink(ThreadRuntime(), receiver.address)
        staged = await link.next_staged(0, WAIT_S)
        assert staged is not None and staged.manifest.probe == probe
        check(staged)
        await link.report_loaded(1, ok=True)
        assert await link.next_staged(1, 0.05) is None and not link.is_fenced
        link.close()

    asyncio.run(load_once())


def test_a_receiver_that_has_no_room_is_an_obstacle_in_the_words_of_its_host_until_it_has(cluster):
    (receiver,) = start(cluster, "receiver.0")
    resource.prlimit(receiver.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))  # as a full disk
    publish(cluster.publisher_client(), 1)
    wait_until(lambda: bool(obstacles(cluster)), "the receiver to be told of")
    (found,) = obstacles(cluster)
    assert (found.service, found.cause) == ("receiver.0", Cause.WEIGHTS_UNDELIVERED)
    assert "no room for" in found.reason and "File too large" in found.reason
    resource.prlimit(receiver.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert load(receiver, 0).number == 1
    wait_until(lambda: not obstacles(cluster), "it to be over")


def obstacles(cluster: Cluster) -> list[Obstacle]:
    return list(cluster.coordinator.status().obstacles)


def test_the_newest_version_wins_and_older_unsent_ones_are_skipped(tmp_path):
    gate = tmp_path / "held"
    with running_cluster(timing=replace(TIMING, deadline_s=WAIT_S)) as cluster:
        (receiver,) = start(cluster, "receiver.0", fault=Fault("hold", number=1, gate=gate))
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        wait_until(gate.exists, "version 1 to be on its way")
        for number in (2, 3, 4):
            publish(publisher_client, number)
        wait_for_counter(cluster, "versions_published", 4)
        gate.unlink()
        follow(receiver, 0, newest=4)
        assert counter(cluster, "versions_skipped") == 2


def test_a_late_joiner_is_served_from_the_current_buffer_without_the_learner(cluster):
    (first,) = start(cluster, "receiver.0")
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    assert load(first).number == 1
    publisher_client.close()
    (late,) = start(cluster, "receiver.1")
    assert load(late).number == 1
    wait_for_counter(cluster, "rounds", 2)


def test_what_the_engine_reads_is_not_overwritten_by_the_next_versions(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    staged = take(receiver)
    assert staged is not None
    tensors = list(open_tensors(staged))
    for number in (2, 3):
        publish(publisher_client, number)
    wait_until(lambda: receiver.status().staged > 1, "a newer version to be staged")
    assert num_segments(cluster.shm_prefix, "receiver.0") == NUM_AT_RECEIVER
    assert num_segments(cluster.shm_prefix, "publisher") <= NUM_AT_PUBLISHER
    check(staged)
    assert tensors[2][1].item() == 1.0
    report_loaded(receiver, 1)
    assert load(receiver, 1).number > 1


def test_a_load_that_failed_is_handed_over_again(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publish(cluster.publisher_client(), 1)
    staged = take(receiver)
    assert staged is not None
    report_loaded(receiver, 1, ok=False, error="half loaded")
    assert load(receiver).number == 1
    wait_for_counter(cluster, "failed_loads", 1)
    wait_for_counter(cluster, "rounds", 1)


def test_a_call_that_a_replica_gave_up_changes_nothing_after_its_later_ones(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publish(cluster.publisher_client(), 1)

    def tell(op: str, seq: int, incarnation: str = "a", **args: object) -> str:
        reply = receiver.client.call(op, deadline_s=2 * WAIT_S, incarnation=incarnation, seq=seq, **args)
        return str(reply.args.get("path", ""))

    assert tell("next_staged", 1, serving=0, wait_s=WAIT_S)
    tell("loaded", 2, number=1, ok=False, error="half loaded")
    assert tell("next_staged", 3, serving=0, wait_s=WAIT_S)
    tell("loaded", 4, number=1, ok=True, error="")
    tell("loaded", 2, number=1, ok=False, error="half loaded")
    assert not tell("next_staged", 1, serving=0, wait_s=0.0)
    assert not tell("next_staged", 5, serving=1, wait_s=0.3), "version 1 is not loaded once more"
    wait_until(lambda: receiver.status().counters.get("late_calls") == 2, "both late calls to be seen")
    assert receiver.status().counters["failed_loads"] == 1
    assert tell("next_staged", 1, incarnation="b", serving=0, wait_s=WAIT_S), "a new process counts from 1"


def test_a_publisher_whose_place_is_taken_takes_no_more_versions(cluster):
    """What it took would reach nobody, and the learner would think it published."""
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    assert publisher_client.has_room()
    elsewhere = {"store_host": "127.0.0.1", "store_port": 1, "started_ms": 1 << 50}
    cluster.coordinator.client.call(
        "publisher_hello", deadline_s=WAIT_S, name=PUBLISHER, incarnation="elsewhere", **elsewhere
    )
    wait_until(lambda: not publisher_client.has_room(), "the publisher to be refused")
    assert not publisher_client.has_lost() and not publisher_client.has_lost(), (
        "calls that are answered behind the one for room"
    )
    assert not publisher_client.room.is_over(), "no room for this one"


def test_a_replica_that_was_started_anew_gets_the_current_version_again(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publish(cluster.publisher_client(), 1)
    assert load(receiver).number == 1
    assert load(receiver, serving=0).number == 1


def test_a_pinned_replica_gets_nothing_until_it_is_unpinned(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    assert load(receiver).number == 1
    receiver.client.call("pin", deadline_s=WAIT_S)
    wait_until(lambda: cluster.members()["receiver.0"].pinned, "the pin to be known")
    publish(publisher_client, 2)
    assert take(receiver, 1, wait_s=0.3) is None
    receiver.client.call("unpin", deadline_s=WAIT_S)
    assert load(receiver, 1).number == 2


def test_the_pin_of_a_replica_that_died_does_not_hold_its_successor(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    assert load(receiver).number == 1
    receiver.client.call("pin", deadline_s=WAIT_S)
    wait_until(lambda: cluster.members()["receiver.0"].pinned, "the pin to be known")
    publish(publisher_client, 2)
    assert load(receiver, serving=0).number in (1, 2), "an engine that was started anew serves nothing"


def test_a_pin_ends_with_its_replica_though_this_receiver_never_heard_what_it_served(cluster):
    """The receiver was started anew while the replica began an evaluation; then the replica died too."""
    (receiver,) = start(cluster, "receiver.0")
    publish(cluster.publisher_client(), 1)
    pinned, successor = (
        ReceiverLink(ThreadRuntime(), receiver.address),
        ReceiverLink(ThreadRuntime(), receiver.address),
    )

    async def follow_on() -> None:
        await pinned.pin()
        assert await pinned.next_staged(0, 0.1) is None, "its own polls do not end the pin"
        assert await successor.next_staged(0, WAIT_S) is not None

    asyncio.run(follow_on())
    pinned.close()
    successor.close()


def test_a_replica_that_is_thought_dead_is_not_heard_beside_its_successor(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publish(cluster.publisher_client(), 1)
    started_ns = time.monotonic_ns()
    successor = ReceiverLink(ThreadRuntime(), receiver.address)
    older = ReceiverLink(
        ThreadRuntime(), receiver.address, started_ns=started_ns
    )  # it was held up before it could make its link

    async def live_on() -> None:
        assert (await older.next_staged(0, WAIT_S)).path, "nobody has followed it"
        staged = await successor.next_staged(0, WAIT_S)
        await older.report_loaded(1, ok=True)
        await older.pin()
        with pytest.raises(FencedError, match="another process has taken this replica's place"):
            await older.next_staged(1, WAIT_S)
        assert older.is_fenced
        await older.drain()
        assert (await successor.next_staged(0, WAIT_S)).path == staged.path
        assert not successor.is_fenced

    asyncio.run(live_on())
    wait_until(lambda: receiver.status().counters.get("past_calls") == 4, "four calls to be refused")
    older.close()
    successor.close()


def test_a_pin_that_was_given_up_and_comes_behind_its_unpin_holds_nothing(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publish(cluster.publisher_client(), 1)
    incarnation = {"incarnation": "a"}
    receiver.client.call("unpin", deadline_s=WAIT_S, seq=2, **incarnation)
    receiver.client.call("pin", deadline_s=WAIT_S, seq=1, **incarnation)
    reply = receiver.client.call(
        "next_staged", deadline_s=2 * WAIT_S, seq=1, serving=0, wait_s=WAIT_S, **incarnation
    )
    assert reply.args["path"]


def test_a_commit_that_was_not_taken_up_waits_for_the_end_of_the_pin(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    assert load(receiver).number == 1
    publish(publisher_client, 2)
    wait_until(lambda: receiver.status().committed == 2, "version 2 to be committed")
    receiver.client.call("pin", deadline_s=WAIT_S)
    wait_until(lambda: receiver.status().committed == 0, "the commit to be taken back")
    assert take(receiver, 1, wait_s=0.3) is None
    receiver.client.call("unpin", deadline_s=WAIT_S)
    assert load(receiver, 1).number == 2


def test_a_commit_that_comes_after_the_pin_is_not_obeyed(cluster):
    (receiver,) = start(cluster, "receiver.0")
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    assert load(receiver).number == 1
    cluster.coordinator.arm("stop:coordinator.commit@2")
    publish(publisher_client, 2)
    wait_until(lambda: state_of(cluster.coordinator.pid) in "Tt", "the coordinator to stop before it commits")
    receiver.client.call("pin", deadline_s=WAIT_S)
    cluster.coordinator.signal(signal.SIGCONT)
    wait_until(lambda: cluster.members()["receiver.0"].pinned, "the pin to be known")
    assert take(receiver, 1, wait_s=0.5) is None
    assert receiver.status().staged == 2 and receiver.status().committed == 0
    receiver.client.call("unpin", deadline_s=WAIT_S)
    assert load(receiver, 1).number == 2


def test_a_draining_replica_gets_nothing_new(cluster):
    first, second = start(cluster, "receiver.0", "receiver.1")
    first.client.call("drain", deadline_s=WAIT_S)
    wait_for_state(cluster, "receiver.0", "DRAINING")
    publish(cluster.publisher_client(), 1)
    assert load(second).number == 1
    assert take(first, 0, wait_s=0.2) is None


def test_a_flipped_byte_never_reaches_the_engine(cluster):
    bad, good = start(cluster, "receiver.0", fault=Fault("flip", number=1, bucket=1)) + start(
        cluster, "receiver.1"
    )
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    assert load(good).number == 1
    wait_until(lambda: counter(cluster, "rounds_failed/digest") > 0, "the digest to be refused")
    assert take(bad, 0, wait_s=0.3) is None
    assert cluster.coordinator.status().culprit == "receiver.0: digest"
    publish(publisher_client, 2)
    assert load(bad).number == 2


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_receiver_lost_in_the_middle_of_a_transfer_costs_the_others_one_retry(hasty_cluster, kind):
    cluster = hasty_cluster
    lost, good = start(cluster, "receiver.0", fault=Fault(kind, number=2, bucket=1)) + start(
        cluster, "receiver.1"
    )
    publisher_client = cluster.publisher_client()
    publish(publisher_client, 1)
    assert load(lost).number == load(good).number == 1
    publish(publisher_client, 2)
    publish(publisher_client, 3)  # the learner does not notice
    follow(good, 1, newest=3)
    wait_for_state(cluster, "receiver.0", "SUSPECT")
    assert cluster.members()["receiver.0"].fenced and not cluster.members()["receiver.1"].fenced
    assert cluster.coordinator.status().culprit.startswith("receiver.0:")
    if kind == "stop":
        lost.signal(signal.SIGCONT)
        follow(lost, 1, newest=3)
        wait_for_state(cluster, "receiver.0", "READY")
        assert not cluster.members()["receiver.0"].fenced


def test_a_receiver_that_is_killed_and_started_again_gets_the_current_version(cluster):
    (lost,) = start(cluster, "receiver.0", environment={"ASYNCRL_FAULT": "receiver.offer@1"})
    publish(cluster.publisher_client(), 1)
    lost.process.join(WAIT_S)
    (again,) = start(cluster, "receiver.0")
    assert load(again).number == 1


def test_publishing_goes_on_while_a_transfer_hangs_until_no_segment_is_free(tmp_path):
    gate = tmp_path / "held"
    with running_cluster(num_segments=2, timing=replace(TIMING, deadline_s=WAIT_S)) as cluster:
        start(cluster, "receiver.0", fault=Fault("hold", number=1, gate=gate))
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        wait_until(gate.exists, "the transfer to begin")
        publish(publisher_client, 2)
        assert not publisher_client.has_room() and not publisher_client.has_room()
        assert not publisher_client.publish(PolicyVersion(3, 2), model(3))
        gate.unlink()
        wait_until(publisher_client.room.is_over, "the answer to who waits for room")
        while not publisher_client.has_room():
            publisher_client.await_room()
        publish(publisher_client, 3)


def test_one_learner_at_a_time_waits_for_a_free_segment_and_none_with_an_older_token(tmp_path):
    gate = tmp_path / "held"
    with running_cluster(num_segments=2, timing=replace(TIMING, deadline_s=WAIT_S)) as cluster:
        start(cluster, "receiver.0", fault=Fault("hold", number=1, gate=gate))
        publisher_client = cluster.publisher_client(token=2)
        publish(publisher_client, 1)
        wait_until(gate.exists, "the transfer to begin")
        publish(publisher_client, 2)
        first = cluster.publisher.client.begin("await_room", deadline_s=WAIT_S, token=2)
        with pytest.raises(FencedError):
            cluster.publisher.client.call("await_room", deadline_s=WAIT_S, token=1)
        assert not first.is_over()
        newer = cluster.publisher.client.begin("await_room", deadline_s=WAIT_S, token=2)
        assert first.end().args == {} and not newer.is_over()
        gate.unlink()
        assert newer.end().args == {}


def test_a_receiver_without_its_coordinator_commits_what_is_verified():
    with running_cluster(**HASTY) as cluster:
        receiver, other = start(cluster, "receiver.0", "receiver.1")
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        wait_until(lambda: receiver.status().staged == 1, "the copy to be verified")
        wait_until(lambda: other.status().staged == 1, "the other copy to be verified")
        cluster.coordinator.kill()
        assert load(receiver).number == load(other).number == 1


def test_a_coordinator_that_was_started_again_learns_all_and_goes_on(tmp_path):
    with running_cluster(socket_dir=tmp_path) as cluster:
        (receiver,) = start(cluster, "receiver.0")
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        assert load(receiver).number == 1
        cluster.coordinator.kill()
        cluster.start("weight_sync.0")
        cluster.wait_for_members("receiver.0")
        publish(publisher_client, 2)
        assert load(receiver, 1).number == 2


def test_a_coordinator_that_was_started_again_knows_whom_the_one_before_it_has_fenced(tmp_path):
    with running_cluster(socket_dir=tmp_path, **HASTY) as cluster:
        (receiver,) = start(cluster, "receiver.0")
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        assert load(receiver).number == 1
        receiver.signal(signal.SIGSTOP)
        publish(publisher_client, 2)
        wait_until(lambda: cluster.members()["receiver.0"].fenced, "the fence")
        cluster.coordinator.kill()
        cluster.start("weight_sync.0")
        receiver.signal(signal.SIGCONT)
        wait_until(lambda: receiver.status().staged == 2, "the thawed receiver to follow")
        assert cluster.members()["receiver.0"].fenced and receiver.status().fenced
        assert load(receiver, 1).number == 2
        wait_until(lambda: not receiver.status().fenced, "the end of the fence")


def test_a_publisher_that_was_started_again_serves_the_learner_s_next_version(tmp_path):
    with running_cluster(socket_dir=tmp_path) as cluster:
        (receiver,) = start(cluster, "receiver.0")
        publisher_client = cluster.publisher_client()
        publish(publisher_client, 1)
        assert load(receiver).number == 1
        cluster.publisher.kill()
        cluster.start("publisher.0")
        publish(publisher_client, 2)
        assert load(receiver, 1).number == 2


def test_a_publisher_that_found_nothing_of_its_forerunner_says_so_until_the_learner_publishes(tmp_path):
    with running_cluster(services=("weight_sync.0", "publisher.0"), socket_dir=tmp_path) as cluster:
        publisher_client = cluster.publisher_client()
        assert not publisher_client.has_lost(), "it has taken nothing yet"
        publish(publisher_client, 1)
        assert not publisher_client.has_lost()
        cluster.publisher.kill()
        assert not publisher_client.has_lost(), "nobody answers: nothing is known"
        cluster.start("publisher.0")
        assert not publisher_client.has_lost(), "it has taken over what it found"
        cluster.publisher.kill()
        segments.unlink_all(cluster.shm_prefix)
        cluster.start("publisher.0")
        wait_until(publisher_client.has_lost, "the loss to be told, by a publisher that has begun to answer")
        publish(publisher_client, 2)
        assert not publisher_client.has_lost()


def test_of_two_polls_of_one_peer_none_stays_without_an_answer():
    """After a pause the coordinator reads polls of connections that are gone beside the one that counts."""
    with running_cluster(services=("weight_sync.0",)) as cluster:
        who = {"name": "receiver.0", "incarnation": "1"}
        info = {"serving": 0, "staged": 0, "attended": False, "pinned": False}
        cluster.coordinator.client.call("hello", deadline_s=WAIT_S, **who, **info)
        clients = [Client(ThreadRuntime(), cluster.coordinator.address) for _ in range(2)]
        polls = [client.begin("next_order", deadline_s=WAIT_S, after=0, **who) for client in clients]
        assert [poll.end().args["known"] for poll in polls] == [True, True]
        for client in clients:
            client.close()
