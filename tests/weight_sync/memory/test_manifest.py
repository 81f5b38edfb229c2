from __future__ import annotations

import itertools

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.errors import SyncError, WireError
from asyncrl.core.staleness import PolicyVersion
from weight_sync.memory.manifest import (
    ALIGNMENT_BYTES,
    Bucket,
    Manifest,
    Probe,
    TensorSpec,
    check_tensors,
    plan,
)
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.publisher import cut

SPECS = [
    TensorSpec("a", "float32", (7, 3)),
    TensorSpec("big", "bfloat16", (1000,)),
    TensorSpec("scalar", "float32", ()),
    TensorSpec("empty", "float32", (0, 4)),
    TensorSpec("z", "int8", (5,)),
]

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs_lists = st.lists(
    st.builds(
        TensorSpec, st.text(min_size=1, max_size=5), st.sampled_from(["float32", "bfloat16", "int8"]), shapes
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda spec: spec.name,
).filter(lambda specs: any(spec.num_bytes for spec in specs))


def make_manifest(bucket_bytes: int = 256, probe: Probe | None = None) -> Manifest:
    layout = plan(SPECS, bucket_bytes)
    sizes = [min(bucket_bytes, layout.total_bytes - i * bucket_bytes) for i in range(layout.num_buckets)]
    return Manifest(PolicyVersion(3, 2), layout, tuple(Bucket(size, "0" * 32) for size in sizes), probe)


def change(manifest: Manifest, path: list[object], value: object) -> bytes:
    plain = msgpack.unpackb(manifest.to_bytes())
    target = plain
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return msgpack.packb(plain)


@given(specs=specs_lists, bucket_bytes=st.integers(1, 500))
def test_tensors_lie_aligned_in_order_and_apart_and_buckets_cover_everything_once(specs, bucket_bytes):
    layout = plan(specs, bucket_bytes)
    end = 0
    for entry, spec in zip(layout.tensors, specs, strict=True):
        assert entry.spec == spec and entry.offset % ALIGNMENT_BYTES == 0 and entry.offset >= end
        end = entry.offset + entry.num_bytes
        pieces = layout.pieces(entry)
        assert pieces[0][1] == entry.offset and pieces[-1][2] == end
        assert all(left[2] == right[1] for left, right in itertools.pairwise(pieces))
        assert all(bucket * bucket_bytes <= a <= b <= (bucket + 1) * bucket_bytes for bucket, a, b in pieces)
    assert end <= layout.total_bytes
    assert (layout.num_buckets - 1) * bucket_bytes < layout.total_bytes <= layout.num_buckets * bucket_bytes


@given(specs=specs_lists, bucket_bytes=st.integers(1, 500))
def test_both_sides_make_the_same_cut(specs, bucket_bytes):
    layout = plan(specs, bucket_bytes)
    sizes = [min(bucket_bytes, layout.total_bytes - i * bucket_bytes) for i in range(layout.num_buckets)]
    manifest = Manifest(PolicyVersion(1, 0), layout, tuple(Bucket(size, "f" * 32) for size in sizes))
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@given(specs=specs_lists, bucket_bytes=st.integers(1, 500), count=st.integers(1, 7))
def test_stripes_hold_each_byte_once_and_are_cut_alike_out_of_a_version_and_out_of_their_own_bytes(
    specs, bucket_bytes, count
):
    layout = plan(specs, bucket_bytes)
    sizes = [min(bucket_bytes, layout.total_bytes - i * bucket_bytes) for i in range(layout.num_buckets)]
    manifest = Manifest(PolicyVersion(1, 0), layout, tuple(Bucket(size, "f" * 32) for size in sizes))
    bytes_B = torch.arange(layout.total_bytes)
    stripes = [Stripe(index, count) for index in range(count)]
    cuts = [cut(bytes_B, manifest, stripe) for stripe in stripes]
    assert torch.cat([bucket for buckets in cuts for bucket in buckets]).equal(bytes_B)
    for stripe, buckets in zip(stripes, cuts, strict=True):
        start, end = layout.span(stripe)
        own = cut(bytes_B[start:end].clone(), manifest, stripe)
        assert [bucket.tolist() for bucket in own] == [bucket.tolist() for bucket in buckets]


def test_a_tensor_larger_than_a_bucket_is_split_and_stays_in_one_piece():
    layout = plan(SPECS, 256)
    big = layout.tensors[1]
    assert [bucket for bucket, _, _ in layout.pieces(big)] == list(range(big.offset // 256, 9))
    assert big.num_bytes == 2000


def test_the_probe_travels_unchanged():
    probe = Probe((1, 2, 3, 4), (-0.25, -1.5), 2, 0.5, 7)
    assert Manifest.from_bytes(make_manifest(probe=probe).to_bytes()).probe == probe
    assert Manifest.from_bytes(make_manifest().to_bytes()).probe is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["version"], [0, 0]),
        (["version"], [1]),
        (["version"], [True, 0]),
        (["bucket_bytes"], 0),
        (["bucket_bytes"], 512),
        (["tensors", 0, 1], "float99"),
        (["tensors", 0, 2], [7, -3]),
        (["tensors", 0, 2], [1] * 17),
        (["tensors", 1, 0], "a"),
        (["tensors", 1, 3], 96),
        (["tensors", 1, 4], 1),
        (["tensors", 0], ["a"]),
        (["tensors"], []),
        (["buckets"], []),
        (["buckets", 0, 0], 255),
        (["buckets", 0, 1], "00"),
        (["probe"], []),
        (["probe"], {"tokens": ["a"], "logprobs": [], "row_tokens": 1, "every": 1}),
        (["probe"], {"tokens": [1, 2, 3], "logprobs": [-0.5, -0.5], "row_tokens": 2, "every": 1}),
        (["probe"], {"tokens": [1, 2, 3, 4], "logprobs": [-0.5], "row_tokens": 2, "every": 1}),
        (["probe"], {"tokens": [1, 2], "logprobs": [], "row_tokens": 1, "every": 1}),
        (["probe"], {"tokens": [], "logprobs": [], "row_tokens": 2, "every": 1}),
        (["probe"], {"tokens": [1, 2], "logprobs": [-0.5], "row_tokens": 2, "every": 0}),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(path, value):
    with pytest.raises(WireError):
        Manifest.from_bytes(change(make_manifest(), path, value))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", msgpack.packb({"version": [1, 0]})])
def test_bytes_that_are_no_manifest_are_refused(data):
    with pytest.raises(WireError):
        Manifest.from_bytes(data)


def test_a_name_that_comes_twice_cannot_be_planned():
    with pytest.raises(SyncError, match="twice"):
        plan([SPECS[0], SPECS[0]], 256)


def test_a_version_without_bytes_cannot_be_planned():
    with pytest.raises(SyncError, match="without any bytes"):
        plan([TensorSpec("empty", "float32", (0,))], 256)


@pytest.mark.parametrize(
    "change_expected",
    [
        lambda expected: expected.pop("a"),
        lambda expected: expected.update(more=(1,)),
        lambda expected: expected.update(a=(3, 7)),
    ],
)
def test_names_and_shapes_must_be_those_of_the_engine(change_expected):
    expected = {spec.name: spec.shape for spec in SPECS}
    check_tensors(make_manifest(), expected)
    change_expected(expected)
    with pytest.raises(SyncError, match="does not fit the engine"):
        check_tensors(make_manifest(), expected)
