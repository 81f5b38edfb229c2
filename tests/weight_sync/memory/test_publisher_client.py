"""The learner's side against a real publisher, without receivers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.core.errors import FencedError, SyncError
from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.cluster import Cluster, model, running_cluster
from tests.weight_sync.memory.test_sharded_publish import TENSORS, ThreadMeeting, make_parts, run_ranks
from weight_sync.memory import segments
from weight_sync.memory.manifest import TensorSpec
from weight_sync.memory.parts import Part
from weight_sync.memory.sharded_publish import TogetherWriter
from weight_sync.publisher_client import PublisherClient, publish_sharded


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started


@pytest.fixture
def publisher_client(cluster: Cluster) -> Iterator[PublisherClient]:
    tokens[0] += 1
    made = cluster.publisher_client(token=tokens[0])
    yield made
    made.close()


tokens = [0]
numbers = iter(range(1, 1000))


def next_version() -> PolicyVersion:
    number = next(numbers)
    return PolicyVersion(number, number - 1)


def published(cluster: Cluster) -> list[int]:
    return list(cluster.publisher.status().version or [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[::-1], "before had"),
        (lambda tensors: tensors[:-1], "ends before the tensor 'head'"),
        (lambda tensors: [*tensors, ("more", torch.ones(1))], "before had None"),
        (lambda tensors: [("embed", tensors[0][1].T), *tensors[1:]], "before had"),
        (lambda tensors: [("embed", tensors[0][1].double()), *tensors[1:]], "before had"),
    ],
)
def test_a_version_with_other_names_shapes_or_dtypes_is_not_published(publisher_client, change, message):
    assert publisher_client.publish(next_version(), model(1))
    with pytest.raises(SyncError, match=message):
        publisher_client.publish(next_version(), change(model(2)))
    assert publisher_client.publish(next_version(), model(3))


def test_specs_given_at_the_start_are_checked_from_the_first_version_on(cluster):
    tokens[0] += 1
    specs = [TensorSpec("w", "float32", (4,))]
    publisher_client = cluster.publisher_client(token=tokens[0], specs=specs)
    with pytest.raises(SyncError, match="before had"):
        publisher_client.publish(next_version(), [("w", torch.ones(5))])
    assert publisher_client.publish(next_version(), [("w", torch.ones(4))])
    publisher_client.close()


def test_an_older_token_is_refused_at_every_call(cluster, publisher_client):
    assert publisher_client.publish(next_version(), model(1))
    tokens[0] += 1
    cluster.publisher_client(token=tokens[0]).close()
    with pytest.raises(FencedError):
        publisher_client.publish(next_version(), model(2))
    with pytest.raises(FencedError):
        cluster.publisher_client(token=tokens[0] - 1)


def test_a_learner_that_is_replaced_in_the_middle_of_a_copy_cannot_commit(cluster, publisher_client):
    def tensors():
        yield from model(1)[:2]
        tokens[0] += 1
        cluster.publisher_client(token=tokens[0]).close()
        yield from model(1)[2:]

    with pytest.raises(FencedError):
        publisher_client.publish(next_version(), tensors())


def test_tensors_may_come_one_at_a_time_and_need_not_be_contiguous(cluster, publisher_client):
    whole = torch.arange(24.0).reshape(4, 6)
    assert publisher_client.publish(next_version(), ((name, tensor) for name, tensor in [("t", whole.T)]))
    paths = segments.find(f"{cluster.shm_prefix}publisher-t{tokens[0]}")
    stored = [Path(path).read_bytes() for path in paths]
    assert whole.T.contiguous().numpy().tobytes() in [data[: 24 * 4] for data in stored]


def test_a_number_that_does_not_rise_is_refused(publisher_client):
    version = next_version()
    assert publisher_client.publish(version, model(1))
    with pytest.raises(SyncError, match="does not rise"):
        publisher_client.publish(version, model(2))


def test_room_that_was_found_is_kept_for_the_publish(publisher_client):
    assert publisher_client.has_room() and publisher_client.has_room()
    assert publisher_client.publish(next_version(), model(1))


class ScriptedModel:
    """What a rank of two holds of a version, and all of it."""

    def __init__(self, rank: int, number: int, gathered: list[int]) -> None:
        self._rank, self._number, self._gathered = rank, number, gathered

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._gathered.append(self._number)
        yield from ((name, tensor + self._number) for name, tensor in TENSORS.items())

    def named_parts(self) -> tuple[Part, ...]:
        return make_parts(self._rank, 2, self._number)


def test_ranks_write_a_version_together_after_a_first_one_that_rank_0_wrote(publisher_client):
    versions, gathered = [next_version() for _ in range(3)], []

    def publish(collectives: ThreadMeeting) -> list[tuple[bool, bool]]:
        together, found = TogetherWriter(collectives), []
        mine = publisher_client if collectives.rank == 0 else None
        for index, version in enumerate(versions):
            assert mine is None or mine.has_room()
            path = collectives.share_bytes(mine.shared_path if mine else "")
            if mine is not None and index == 2:
                Path(path).unlink()
            collectives.add([0])  # nobody writes before the segment is gone
            model_of_rank = ScriptedModel(collectives.rank, index, gathered)
            found.append((bool(path), publish_sharded(mine, together, path, version, model_of_rank)))
        return found

    first, second = run_ranks(2, publish)
    assert first == [(False, True), (True, True), (True, False)], "the last segment was gone"
    assert second == [(False, True), (True, True), (True, True)]
    assert gathered == [0, 0], "on both ranks, for the first version"
    assert (publisher_client.published, publisher_client.num_absences) == (versions[1], 1)
    times = publisher_client.take_times().metrics()
    assert times["weights/publish_copy_s"] > 0 and set(publisher_client.take_times().metrics().values()) == {
        0.0
    }


def test_a_publisher_that_ends_leaves_nothing_behind():
    with running_cluster() as cluster:
        cluster.start("receiver.0")
        publisher_client = cluster.publisher_client()
        assert publisher_client.publish(PolicyVersion(1, 0), model(1))
        publisher_client.close()
        assert segments.find(cluster.shm_prefix)
        cluster.children["receiver.0"].end()
        cluster.publisher.end()
        assert segments.find(cluster.shm_prefix) == []
