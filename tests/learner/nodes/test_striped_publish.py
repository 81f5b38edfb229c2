"""Ranks, here threads, that publish to a publisher on each of their nodes; the nodes are one machine here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import AsyncrlError, SyncError
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.staleness import PolicyVersion
from learner.striped import StripedPublish, own_stripes
from tests.weight_sync.cluster import Cluster, model, running_cluster
from tests.weight_sync.memory.test_manifest import specs_lists
from tests.weight_sync.memory.test_sharded_publish import ThreadMeeting, run_ranks
from weight_sync import publisher_client
from weight_sync.memory import segments
from weight_sync.memory.manifest import Layout, TensorSpec, plan
from weight_sync.memory.publisher_state import PublisherStateFile
from weight_sync.memory.writer import SegmentWriter
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.publisher_client import PublisherClient

BUCKET_BYTES = 1000


class Model:
    """A model whose weights are those of version `number`; all ranks take part in each tensor's gather."""

    def __init__(self, number: int, collectives: ThreadMeeting) -> None:
        self.tensors, self._collectives = model(number), collectives

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, found in enumerate(self.tensors):
            assert self._collectives.largest([number]) == [number]
            yield found

    def named_parts(self) -> tuple[()]:
        return ()


def whole_bytes(tensors: list[tuple[str, torch.Tensor]], layout: Layout) -> bytes:
    image = bytearray(layout.total_bytes)
    for entry, (_, tensor) in zip(layout.tensors, tensors, strict=True):
        if tensor.numel():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            image[entry.offset : entry.offset + entry.num_bytes] = data
    return bytes(image)


class Cut:
    """A place that keeps what is put there."""

    def __init__(self, num_bytes: int) -> None:
        self.data = bytearray(num_bytes)

    def put(self, offset: int, piece: object) -> None:
        data = bytes(piece)  # type: ignore[call-overload]
        assert offset >= 0 and offset + len(data) <= len(self.data), "it is of another stripe"
        self.data[offset : offset + len(data)] = data


@settings(max_examples=60, deadline=None)
@given(specs=specs_lists, bucket_bytes=st.integers(1, 500), count=st.integers(1, 5))
def test_stripes_are_written_and_digested_as_one_publisher_would_have_it(
    specs: list[TensorSpec], bucket_bytes: int, count: int
) -> None:
    layout = plan(specs, bucket_bytes)
    made = torch.Generator().manual_seed(len(specs))
    tensors = [
        (spec.name, torch.randint(1, 100, spec.shape, generator=made).to(getattr(torch, spec.dtype)))
        for spec in specs
    ]
    image, data, digests = whole_bytes(tensors, layout), b"", []
    for index in range(count):
        start, end = layout.span(Stripe(index, count))
        place = Cut(end - start)
        writer = SegmentWriter(place, bucket_bytes, (start, end))
        for _, tensor in tensors:
            writer.write(tensor)
        found = writer.finish()
        assert len(found) == len(Stripe(index, count).buckets(layout.num_buckets))
        data, digests = data + place.data, [*digests, *(bucket.digest for bucket in found)]
    assert data == image
    pieces = [image[at : at + bucket_bytes] for at in range(0, len(image), bucket_bytes)]
    assert digests == [xxhash.xxh3_128_hexdigest(piece) for piece in pieces]


@pytest.fixture
def publishers(tmp_path: Path) -> Iterator[Cluster]:
    """Three publishers, each of a stripe; no coordinator is there to order rounds."""
    names = [f"publisher.{index}" for index in range(3)]
    with running_cluster(services=names, socket_dir=tmp_path, num_stripes=3, num_segments=2) as cluster:
        yield cluster


Publish = Callable[[StripedPublish, ThreadMeeting], object]


def run_striped(
    cluster: Cluster, publish: Publish, writers: dict[int, int], bucket_bytes: int = BUCKET_BYTES
) -> list[object]:
    """Have four ranks publish; `writers` names the rank of each stripe."""

    def enter(collectives: ThreadMeeting) -> object:
        clients: list[PublisherClient] = []

        def connect(token: int, stripe: Stripe) -> PublisherClient:
            address = cluster.children[f"publisher.{stripe.index}"].address
            clients.append(
                PublisherClient(
                    ThreadRuntime(), address, cluster.shm_prefix, bucket_bytes, token, stripe=stripe
                )
            )
            return clients[-1]

        own = [Stripe(index, 3) for index, rank in writers.items() if rank == collectives.rank]
        try:
            return publish(StripedPublish(connect, own, collectives, bucket_bytes), collectives)
        except AsyncrlError as error:
            return error
        finally:
            for client in clients:
                client.close()

    return run_ranks(4, enter)


def publish_once(striped: StripedPublish, number: int, collectives: ThreadMeeting) -> bool:
    """Return whether version `number` was published."""
    exporter = Model(number, collectives)
    return striped.has_room(1, None, exporter) and striped.publish(PolicyVersion(number, number), exporter)


def stripes_of(cluster: Cluster) -> list[tuple[int, bytes]]:
    """Return the version number and the bytes that each publisher has, as it leaves them to its successor."""
    found = []
    for index in range(3):
        stripe = Stripe(index, 3)
        state = PublisherStateFile(f"{cluster.shm_prefix}{stripe.publisher}-").read()
        assert state is not None and state.manifest is not None
        layout = state.manifest.layout
        assert layout == plan(
            (TensorSpec(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in model(1)), BUCKET_BYTES
        )
        data = Path(state.path).read_bytes()
        start, end = layout.span(stripe)
        assert len(data) == end - start
        number = state.manifest.version.number
        image = whole_bytes(model(number), layout)
        digests = [xxhash.xxh3_128_hexdigest(image[at : at + 1000]) for at in range(0, len(image), 1000)]
        assert list(state.manifest.digests) == digests, "each has the manifest of the whole version"
        assert data == image[start:end]
        assert not list(Path(state.path).parent.glob(f"{Path(state.path).name}.*")), (
            "no share of it is mapped"
        )
        found.append((number, data))
    return found


@pytest.mark.parametrize("writers", [{0: 0, 1: 1, 2: 3}, {0: 0, 1: 2, 2: 0}], ids=["each", "shared"])
def test_each_publisher_has_its_stripe_of_the_weights_and_the_manifest_of_all(
    publishers: Cluster, writers: dict[int, int]
) -> None:
    def publish(striped: StripedPublish, collectives: ThreadMeeting) -> object:
        return [publish_once(striped, number, collectives) for number in (1, 2)]

    assert run_striped(publishers, publish, writers) == [[True, True]] * 4
    assert [number for number, _ in stripes_of(publishers)] == [2, 2, 2]
    assert len({data for _, data in stripes_of(publishers)}) == 3


def test_a_publish_waits_for_a_publisher_that_is_away_and_its_successor_has_its_stripe(
    publishers: Cluster,
) -> None:
    def publish(striped: StripedPublish, collectives: ThreadMeeting) -> object:
        found = [publish_once(striped, 1, collectives)]
        if collectives.rank == 0:
            publishers.children["publisher.1"].kill()
        collectives.largest([0])
        found += [publish_once(striped, 2, collectives), striped.has_lost()]
        collectives.largest([0])
        if collectives.rank == 0:
            assert [number for number, _ in stripes_of(publishers)] == [1, 1, 1]
            publishers.start("publisher.1")
            assert publishers.children["publisher.1"].status().version == (1, 1)
        collectives.largest([0])
        return [*found, striped.has_lost(), publish_once(striped, 3, collectives)]

    assert run_striped(publishers, publish, {0: 0, 1: 1, 2: 2}) == [[True, False, False, False, True]] * 4
    assert [number for number, _ in stripes_of(publishers)] == [3, 3, 3]


@pytest.mark.parametrize("how", ["before the copy", "at its commit"])
def test_a_version_that_one_publisher_has_not_taken_counts_nowhere_and_the_next_one_replaces_it(
    publishers: Cluster, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_client, "CALL_DEADLINE_S", 1.0)

    def publish(striped: StripedPublish, collectives: ThreadMeeting) -> object:
        exporter = Model(2, collectives)
        found = [publish_once(striped, 1, collectives), striped.has_room(1, None, exporter)]
        if collectives.rank == 0 and how == "before the copy":
            publishers.children["publisher.2"].kill()
            publishers.start("publisher.2")  # which has nothing reserved
        elif collectives.rank == 0:
            publishers.children["publisher.2"].arm("publisher.commit@2")
        collectives.largest([0])
        found.append(striped.publish(PolicyVersion(2, 2), exporter))
        found.append(all(client.published == PolicyVersion(1, 1) for client in striped._clients))
        if collectives.rank == 0 and how == "at its commit":
            assert [number for number, _ in stripes_of(publishers)] == [2, 2, 1]
            publishers.start("publisher.2")
        collectives.largest([0])
        return [*found, striped.has_lost(), publish_once(striped, 3, collectives)]

    found = run_striped(publishers, publish, {0: 0, 1: 1, 2: 2})
    assert found == [[True, True, False, True, False, True]] * 4
    assert [number for number, _ in stripes_of(publishers)] == [3, 3, 3]


def test_a_publisher_that_has_lost_its_stripe_is_found_out_by_every_rank(publishers: Cluster) -> None:
    def publish(striped: StripedPublish, collectives: ThreadMeeting) -> object:
        found = [publish_once(striped, 1, collectives), striped.has_lost()]
        if collectives.rank == 0:
            publishers.children["publisher.2"].kill()
            segments.unlink_all(f"{publishers.shm_prefix}publisher.2-")  # as the fleet does
            publishers.start("publisher.2")
        collectives.largest([0])
        return [*found, striped.has_lost(), publish_once(striped, 2, collectives), striped.has_lost()]

    assert run_striped(publishers, publish, {0: 0, 1: 1, 2: 2}) == [[True, False, True, True, False]] * 4


def test_other_tensors_than_before_are_an_error_on_every_rank(publishers: Cluster) -> None:
    def publish(striped: StripedPublish, collectives: ThreadMeeting) -> object:
        assert publish_once(striped, 1, collectives)
        other = Model(2, collectives)
        if collectives.rank == 3:
            other.tensors[1] = ("norm", torch.zeros(34, dtype=torch.bfloat16))
        assert striped.has_room(1, None, other)
        return striped.publish(PolicyVersion(2, 2), other)

    found = run_striped(publishers, publish, {0: 0, 1: 1, 2: 2})
    assert all(isinstance(one, SyncError) for one in found), found
    assert [number for number, _ in stripes_of(publishers)] == [1, 1, 1]


def test_publishers_without_a_bucket_take_part_all_the_same(publishers: Cluster) -> None:
    def publish(striped: StripedPublish, collectives: ThreadMeeting) -> object:
        return [publish_once(striped, number, collectives) for number in (1, 2)]

    found = run_striped(publishers, publish, {0: 0, 1: 1, 2: 2}, bucket_bytes=1 << 20)
    assert found == [[True, True]] * 4
    assert [publishers.children[f"publisher.{at}"].status().version for at in range(3)] == [(2, 2)] * 3


class OneRank:
    """Ranks that are told what each of them knows."""

    def __init__(self, rank: int, known: list[int]) -> None:
        self.is_leader, self._known = rank == 0, known

    def gather(self, values: list[int]) -> list[int]:
        return sorted({*values, *self._known})


@pytest.mark.parametrize(
    ("rank", "named", "own"),
    [
        (0, ["publisher.0"], [0]),
        (0, ["publisher.0", "publisher.2"], [0, 2]),
        (1, ["publisher.0"], []),
        (2, ["buffer.0", "publisher.0", "publisher.1"], [1]),
    ],
)
def test_a_rank_writes_for_the_publishers_that_it_is_told_of(
    rank: int, named: list[str], own: list[int]
) -> None:
    stripes, count = own_stripes(named, OneRank(rank, [0, 1, 2]))  # type: ignore[arg-type]
    assert (stripes, count) == ([Stripe(index, 3) for index in own], 3)
