"""The learner's side against a real publisher, without receivers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.core.errors import FencedError, SyncError
from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.cluster import Cluster, model, running_cluster
from tests.weight_sync.memory.test_together import TENSORS, ThreadMeeting, make_parts, run_ranks
from weight_sync.handoff import Handoff, publish_together
from weight_sync.memory import segments
from weight_sync.memory.manifest import TensorSpec
from weight_sync.memory.parts import Part
from weight_sync.memory.together import TogetherWriter


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started


@pytest.fixture
def handoff(cluster: Cluster) -> Iterator[Handoff]:
    tokens[0] += 1
    made = cluster.handoff(token=tokens[0])
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
def test_a_version_with_other_names_shapes_or_dtypes_is_not_published(handoff, change, message):
    assert handoff.publish(next_version(), model(1))
    with pytest.raises(SyncError, match=message):
        handoff.publish(next_version(), change(model(2)))
    assert handoff.publish(next_version(), model(3))


def test_specs_given_at_the_start_are_checked_from_the_first_version_on(cluster):
    tokens[0] += 1
    specs = [TensorSpec("w", "float32", (4,))]
    handoff = cluster.handoff(token=tokens[0], specs=specs)
    with pytest.raises(SyncError, match="before had"):
        handoff.publish(next_version(), [("w", torch.ones(5))])
    assert handoff.publish(next_version(), [("w", torch.ones(4))])
    handoff.close()


def test_an_older_token_is_refused_at_every_call(cluster, handoff):
    assert handoff.publish(next_version(), model(1))
    tokens[0] += 1
    cluster.handoff(token=tokens[0]).close()
    with pytest.raises(FencedError):
        handoff.publish(next_version(), model(2))
    with pytest.raises(FencedError):
        cluster.handoff(token=tokens[0] - 1)


def test_a_learner_that_is_replaced_in_the_middle_of_a_copy_cannot_commit(cluster, handoff):
    def tensors():
        yield from model(1)[:2]
        tokens[0] += 1
        cluster.handoff(token=tokens[0]).close()
        yield from model(1)[2:]

    with pytest.raises(FencedError):
        handoff.publish(next_version(), tensors())


def test_tensors_may_come_one_at_a_time_and_need_not_be_contiguous(cluster, handoff):
    whole = torch.arange(24.0).reshape(4, 6)
    assert handoff.publish(next_version(), ((name, tensor) for name, tensor in [("t", whole.T)]))
    paths = segments.find(f"{cluster.shm_prefix}publisher-t{tokens[0]}")
    stored = [Path(path).read_bytes() for path in paths]
    assert whole.T.contiguous().numpy().tobytes() in [data[: 24 * 4] for data in stored]


def test_a_number_that_does_not_rise_is_refused(handoff):
    version = next_version()
    assert handoff.publish(version, model(1))
    with pytest.raises(SyncError, match="does not rise"):
        handoff.publish(version, model(2))


def test_room_that_was_found_is_kept_for_the_publish(handoff):
    assert handoff.has_room() and handoff.has_room()
    assert handoff.publish(next_version(), model(1))


class ScriptedModel:
    """What a rank of two holds of a version, and all of it."""

    def __init__(self, rank: int, number: int, gathered: list[int]) -> None:
        self._rank, self._number, self._gathered = rank, number, gathered

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._gathered.append(self._number)
        yield from ((name, tensor + self._number) for name, tensor in TENSORS.items())

    def named_parts(self) -> tuple[Part, ...]:
        return make_parts(self._rank, 2, self._number)


def test_ranks_write_a_version_together_after_a_first_one_that_rank_0_wrote(handoff):
    versions, gathered = [next_version() for _ in range(3)], []

    def publish(meeting: ThreadMeeting) -> list[tuple[bool, bool]]:
        together, found = TogetherWriter(meeting), []
        mine = handoff if meeting.rank == 0 else None
        for index, version in enumerate(versions):
            assert mine is None or mine.has_room()
            path = meeting.share_bytes(mine.shared_path if mine else "")
            if mine is not None and index == 2:
                Path(path).unlink()
            meeting.add([0])  # nobody writes before the segment is gone
            model_of_rank = ScriptedModel(meeting.rank, index, gathered)
            found.append((bool(path), publish_together(mine, together, path, version, model_of_rank)))
        return found

    first, second = run_ranks(2, publish)
    assert first == [(False, True), (True, True), (True, False)], "the last segment was gone"
    assert second == [(False, True), (True, True), (True, True)]
    assert gathered == [0, 0], "on both ranks, for the first version"
    assert (handoff.published, handoff.num_absences) == (versions[1], 1)
    times = handoff.take_times().metrics()
    assert times["weights/publish_copy_s"] > 0 and set(handoff.take_times().metrics().values()) == {0.0}


def test_a_publisher_that_ends_leaves_nothing_behind():
    with running_cluster() as cluster:
        cluster.start("receiver.0")
        handoff = cluster.handoff()
        assert handoff.publish(PolicyVersion(1, 0), model(1))
        handoff.close()
        assert segments.find(cluster.shm_prefix)
        cluster.children["receiver.0"].end()
        cluster.publisher.end()
        assert segments.find(cluster.shm_prefix) == []
