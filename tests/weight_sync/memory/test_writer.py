"""Contents of a segment and the writer's description of them, for every way in which it is written."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import SyncError
from weight_sync.memory import segments, writer
from weight_sync.memory.manifest import TensorSpec, plan
from weight_sync.memory.writer import GrowingPlace, MappedPlace, Mappings, SegmentWriter

SHAPES = st.sampled_from([(), (1,), (0, 3), (7,), (5, 13), (64,), (33, 2, 2)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64])


def make_tensors(specs: list[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(specs))
    return [(torch.randn(shape, generator=generator) * 50).to(dtype) for shape, dtype in specs]


def lay_out(tensors: list[torch.Tensor], bucket_bytes: int) -> tuple[bytes, list[tuple[int, str]]]:
    """Return the bytes of a version and its buckets, put together in the plainest way."""
    specs = [TensorSpec(str(i), str(t.dtype)[6:], tuple(t.shape)) for i, t in enumerate(tensors)]
    layout = plan(specs, bucket_bytes)
    image = bytearray(layout.total_bytes)
    for entry, tensor in zip(layout.tensors, tensors, strict=True):
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        image[entry.offset : entry.offset + entry.num_bytes] = data
    buckets = [bytes(image[start : start + bucket_bytes]) for start in range(0, len(image), bucket_bytes)]
    return bytes(image), [(len(bucket), xxhash.xxh3_128(bucket).hexdigest()) for bucket in buckets]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6), st.integers(40, 700), st.integers(16, 300)
)
def test_bytes_and_digests_are_those_of_the_plain_layout(specs, bucket_bytes, piece_bytes):
    tensors = make_tensors([*specs, ((9,), torch.float32)])
    image, buckets = lay_out(tensors, bucket_bytes)
    bytes_B = np.full(len(image), 77, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PIECE_BYTES", piece_bytes)
        made = SegmentWriter(MappedPlace(bytes_B), bucket_bytes)
        for tensor in tensors:
            made.write(tensor)
        found = made.finish()
    assert bytes_B.tobytes() == image
    assert [(bucket.num_bytes, bucket.digest) for bucket in found] == buckets


def test_a_file_that_grows_gets_the_same_bytes(prefix):
    tensors = make_tensors([((5, 13), torch.bfloat16), ((), torch.float32), ((64,), torch.int8)])
    image, buckets = lay_out(tensors, 100)
    path = segments.create(f"{prefix}a", 0)
    with GrowingPlace(path) as place:
        made = SegmentWriter(place, 100)
        for tensor in tensors:
            made.write(tensor.T if tensor.dim() == 2 else tensor)
        found = made.finish()
    tensors[0] = tensors[0].T
    image, buckets = lay_out(tensors, 100)
    with open(path, "rb") as file:
        assert file.read() == image
    assert [(bucket.num_bytes, bucket.digest) for bucket in found] == buckets


def test_a_digest_is_of_what_was_given_and_not_of_what_arrived():
    class Spoilt(MappedPlace):
        def put(self, offset, piece):
            super().put(offset, piece ^ 1)

    made = SegmentWriter(Spoilt(np.zeros(64, np.uint8)), 64)
    made.write(torch.arange(64, dtype=torch.uint8))
    (bucket,) = made.finish()
    assert bucket.digest == xxhash.xxh3_128(bytes(range(64))).hexdigest()


def test_a_mapping_is_kept_while_its_segment_is_there(prefix):
    mappings = Mappings()
    path = segments.create(f"{prefix}a", 128)
    first = mappings.open(path, 128)
    assert mappings.open(path, 128) is first
    segments.unlink(path)
    with pytest.raises(SyncError, match="is gone"):
        mappings.open(path, 128)


def test_mappings_of_segments_that_are_gone_are_let_go(prefix):
    mappings = Mappings()
    old = segments.create(f"{prefix}a", 128)
    mappings.open(old, 128)
    segments.unlink(old)
    mappings.open(segments.create(f"{prefix}b", 128), 128)
    with open("/proc/self/maps") as maps:
        assert os.path.basename(old) not in maps.read()
