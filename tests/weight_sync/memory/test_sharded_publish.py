"""Ranks, here threads, that write one version into one segment, each its own parts."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import SyncError
from weight_sync.memory import parts as parts_module
from weight_sync.memory import segments
from weight_sync.memory.manifest import Layout, TensorSpec, plan
from weight_sync.memory.parts import Part, split_parts
from weight_sync.memory.sharded_publish import TogetherWriter, Written

WAIT_S = 60.0


class ThreadMeeting:
    """Meetings of threads; one that does not come breaks them for all, as a group's timeout does."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, table: dict[int, Any]) -> None:
        self.rank, self.world_size = rank, world_size
        self._barrier, self._table = barrier, table

    def largest(self, values):
        return [max(column) for column in zip(*self._exchange(list(values)), strict=True)]

    def add(self, values):
        return [sum(column) for column in zip(*self._exchange(list(values)), strict=True)]

    def share_bytes(self, data):
        return self._exchange(data)[0]

    def merge_bytes(self, data):
        return bytes(sum(column) for column in zip(*self._exchange(data), strict=True))

    def leave(self):
        """Die, as the others learn of it."""
        self._barrier.abort()

    def _exchange(self, mine):
        self._table[self.rank] = mine
        self._barrier.wait()
        found = [self._table[rank] for rank in range(self.world_size)]
        self._barrier.wait()
        return found


def run_ranks(world_size: int, run: Callable[[ThreadMeeting], Any]) -> list[Any]:
    """Return what `run` returns for each rank, or the error that it raises."""
    barrier, table, results = threading.Barrier(world_size, timeout=WAIT_S), {}, [None] * world_size

    def enter(rank: int) -> None:
        try:
            results[rank] = run(ThreadMeeting(rank, world_size, barrier, table))
        except Exception as error:  # the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


TENSORS = {
    "rows": torch.arange(0, 77 * 6, dtype=torch.float32).reshape(77, 6),
    "columns": torch.arange(0, 50 * 8, dtype=torch.float32).reshape(50, 8) + 0.5,
    "norm": torch.arange(0, 33, dtype=torch.float32),
    "scalar": torch.tensor(3.0),
    "deep": torch.arange(0, 120, dtype=torch.float32).reshape(10, 3, 4),
    "empty": torch.empty(0, 4),
}
"""A tensor cut by rows, one by columns, and others that one rank has; odd sizes leave gaps."""


def make_parts(rank: int, world_size: int, number: int) -> tuple[Part, ...]:
    """Return what `rank` holds of version `number`: its rows, its columns, and some tensors whole."""
    parts = []
    for index, (name, tensor) in enumerate(TENSORS.items()):
        shape = tuple(tensor.shape)
        matrix_RC = (tensor + number).reshape(shape[0] if shape else 1, -1) if tensor.numel() else tensor
        if name == "rows":
            first, last = (len(matrix_RC) * (rank + i) // world_size for i in (0, 1))
            parts.append(Part(name, shape, first, 0, matrix_RC[first:last]))
        elif name == "columns":
            first, last = (matrix_RC.shape[1] * (rank + i) // world_size for i in (0, 1))
            parts.append(Part(name, shape, 0, first, matrix_RC[:, first:last].contiguous()))
        elif index % world_size == rank:
            parts.append(Part(name, shape, 0, 0, matrix_RC))
    return tuple(parts[::-1])


def make_layout(bucket_bytes: int, dtype: str = "float32") -> Layout:
    return plan([TensorSpec(name, dtype, tuple(t.shape)) for name, t in TENSORS.items()], bucket_bytes)


def image_of(layout: Layout, number: int) -> bytes:
    image = bytearray(layout.total_bytes)
    for entry in layout.tensors:
        tensor = (TENSORS[entry.name] + number).to(getattr(torch, entry.dtype)).contiguous().reshape(-1)
        if tensor.numel():
            image[entry.offset : entry.offset + entry.num_bytes] = tensor.view(torch.uint8).numpy().tobytes()
    return bytes(image)


def check_digests(layout: Layout, image: bytes, written: Written) -> None:
    size = layout.bucket_bytes
    wanted = [image[start : start + size] for start in range(0, len(image), size)]
    assert [bucket.num_bytes for bucket in written.buckets] == [len(data) for data in wanted]
    digests = [xxhash.xxh3_128(data).hexdigest() for data in wanted]
    assert [bucket.digest for bucket in written.buckets] == digests


def make_path(prefix: str, layout: Layout, content: int = 77) -> str:
    path = segments.create(f"{prefix}{uuid.uuid4().hex[:8]}", layout.total_bytes)
    Path(path).write_bytes(bytes([content]) * layout.total_bytes)
    return path


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4), st.integers(40, 900), st.integers(16, 300), st.sampled_from(["float32", "bfloat16"])
)
def test_bytes_and_digests_are_those_of_the_plain_layout(world_size, bucket_bytes, piece_bytes, dtype):
    """Whatever was in the segment before, and though float32 weights are published in bfloat16."""
    layout = make_layout(bucket_bytes, dtype)
    prefix = f"asyncrl-{uuid.uuid4().hex[:8]}-"
    paths = [make_path(prefix, layout) for _ in range(2)]

    def publish(collectives: ThreadMeeting) -> list[Written | None]:
        together = TogetherWriter(collectives)
        versions = [make_parts(collectives.rank, world_size, number) for number in range(2)]
        assert together.agrees(paths[0], layout if collectives.rank == 0 else None, versions[0])
        return [together.write(path, parts) for path, parts in zip(paths, versions, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_module, "PIECE_BYTES", piece_bytes)
        results = run_ranks(world_size, publish)
    contents = [Path(path).read_bytes() for path in paths]
    segments.unlink_all(prefix)
    assert [number for number in range(2) if contents[number] != image_of(layout, number)] == []
    for number, written in enumerate(results[0]):
        check_digests(layout, contents[number], written)


def publish_on(paths: Sequence[str], layout: Layout, collectives: ThreadMeeting) -> Written | bool | None:
    """Publish once; `paths` are where each rank thinks that the segment is."""
    together = TogetherWriter(collectives)
    parts = make_parts(collectives.rank, collectives.world_size, 0)
    if not together.agrees(paths[collectives.rank], layout if collectives.rank == 0 else None, parts):
        return False
    return together.write(paths[collectives.rank], parts)


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_no_rank_writes_if_one_cannot_map_the_segment(prefix, stranger):
    layout = make_layout(400)
    paths = [make_path(prefix, layout)] * 3
    paths[stranger] = "/dev/shm/asyncrl-another-host"
    assert run_ranks(3, lambda collectives: publish_on(paths, layout, collectives)) == [False] * 3


def test_a_segment_of_the_same_name_on_another_host_is_not_taken_for_this_one(prefix):
    layout = make_layout(400)
    paths = [make_path(prefix, layout), make_path(prefix, layout)]
    assert run_ranks(2, lambda collectives: publish_on(paths, layout, collectives)) == [False] * 2


@pytest.mark.parametrize("unlucky", [0, 1])
def test_a_segment_that_is_gone_for_one_rank_is_gone_for_all_and_they_agree_anew(prefix, unlucky):
    layout = make_layout(400)
    path = make_path(prefix, layout)

    def publish(collectives: ThreadMeeting) -> list[bool]:
        together, parts = TogetherWriter(collectives), make_parts(collectives.rank, 2, 0)
        known = layout if collectives.rank == 0 else None
        assert together.agrees(path, known, parts)
        written = together.write(path + "-gone" if collectives.rank == unlucky else path, parts)
        with pytest.raises(AssertionError, match="have not agreed"):
            together.write(path, parts)
        assert together.agrees(path, known, parts)
        return [written is not None, together.write(path, parts) is not None]

    assert run_ranks(2, publish) == [[False, True]] * 2


def test_a_rank_that_does_not_come_to_the_meeting_leaves_no_version(prefix):
    layout = make_layout(400)
    path = make_path(prefix, layout)

    def publish(collectives: ThreadMeeting) -> Written | None:
        together, parts = TogetherWriter(collectives), make_parts(collectives.rank, 2, 0)
        assert together.agrees(path, layout if collectives.rank == 0 else None, parts)
        if collectives.rank == 1:
            collectives.leave()
            return None
        return together.write(path, parts)

    first, _ = run_ranks(2, publish)
    assert isinstance(first, threading.BrokenBarrierError)


def test_a_rank_that_fails_fails_all(prefix):
    layout = make_layout(400)
    path = make_path(prefix, layout)

    def other_parts(collectives: ThreadMeeting) -> object:
        together, parts = TogetherWriter(collectives), make_parts(collectives.rank, 2, 0)
        assert together.agrees(path, layout if collectives.rank == 0 else None, parts)
        if collectives.rank == 1:
            parts = (*parts[:-1], Part("rows", (78, 6), 0, 0, parts[-1].values_RC))
        return together.write(path, parts)

    first, second = run_ranks(2, other_parts)
    assert "another learner rank" in str(first) and "came where" in str(second)
    assert [type(error) for error in (first, second)] == [SyncError] * 2


@pytest.mark.parametrize("missing", ["rows", "norm"])
def test_a_rank_that_holds_less_than_before_fails_all(prefix, missing):
    layout = make_layout(200)
    path = make_path(prefix, layout)

    def publish(collectives: ThreadMeeting) -> Written | None:
        together, parts = TogetherWriter(collectives), make_parts(collectives.rank, 2, 0)
        assert together.agrees(path, layout if collectives.rank == 0 else None, parts)
        assert together.write(path, parts) is not None
        return together.write(path, tuple(part for part in parts if part.name != missing))

    errors = run_ranks(2, publish)
    assert [type(error) for error in errors] == [SyncError] * 2
    assert any("other parts than for the versions before" in str(error) for error in errors)


@pytest.mark.parametrize("missing", ["rows", "columns"])
def test_parts_that_are_not_all_of_a_version_are_refused_by_every_rank(prefix, missing):
    layout = make_layout(400)
    path = make_path(prefix, layout)

    def agree(collectives: ThreadMeeting) -> bool:
        parts = make_parts(collectives.rank, 2, 0)
        if collectives.rank == 1:
            parts = tuple(part for part in parts if part.name != missing)
        return TogetherWriter(collectives).agrees(path, layout if collectives.rank == 0 else None, parts)

    errors = run_ranks(2, agree)
    assert all(isinstance(error, SyncError) and "the ranks hold" in str(error) for error in errors)


def test_parts_of_another_model_are_refused_by_every_rank(prefix):
    layout = make_layout(400)
    path = make_path(prefix, layout)

    def agree(collectives: ThreadMeeting) -> bool:
        parts = make_parts(collectives.rank, 2, 0)
        if collectives.rank == 1:
            parts = (*parts, Part("stranger", (1, 1), 0, 0, torch.zeros(1, 1)))
        return TogetherWriter(collectives).agrees(path, layout if collectives.rank == 0 else None, parts)

    errors = run_ranks(2, agree)
    assert [type(error) for error in errors] == [SyncError] * 2 and "stranger" in str(errors[1])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_shares_of_ranks_with_the_same_parts_cover_each_row_once(heights, count):
    parts = [Part(str(i), (n, 3), 0, 0, torch.zeros(n, 3)) for i, n in enumerate(heights)]
    shares = [split_parts(parts, index, count) for index in range(count)]
    rows = sorted((p.name, p.row + i) for share in shares for p in share for i in range(len(p.values_RC)))
    assert rows == sorted((part.name, i) for part in parts for i in range(len(part.values_RC)))
    sizes = [sum(len(part.values_RC) for part in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_bucket_that_one_rank_fills_is_digested_by_no_other(prefix):
    """Two stages: the first writes `first`, the second `second`; one bucket has some of both."""
    halves = {"first": torch.arange(256.0).reshape(64, 4), "second": torch.arange(256.0).reshape(64, 4) + 1}
    layout = plan([TensorSpec(name, "float32", (64, 4)) for name in halves], 300)
    path = make_path(prefix, layout)

    def publish(collectives: ThreadMeeting) -> list[int]:
        name = list(halves)[collectives.rank]
        parts, together = (Part(name, (64, 4), 0, 0, halves[name]),), TogetherWriter(collectives)
        assert together.agrees(path, layout if collectives.rank == 0 else None, parts)
        assert together._plan is not None
        return [*together._plan.writer.whole_buckets, *(-index for index in together._plan.shared)]

    first, second = run_ranks(2, publish)
    assert (sorted(first), sorted(second)) == ([-3, 0, 1, 2], [4, 5, 6])


def test_a_copy_has_no_more_bytes_than_a_buffer_also_where_rows_are_wider():
    values = torch.arange(30, dtype=torch.float32).view(3, 10)
    layout = plan([TensorSpec("w", "float32", (3, 10))], 1 << 12)
    bytes_B = np.zeros(layout.total_bytes, dtype=np.uint8)
    spot = parts_module._place(layout.tensors[0], Part("w", (3, 10), 0, 0, values))
    copies = list(parts_module._copies(bytes_B, spot, 16))
    for copy in copies:
        assert copy.source.numel() * 4 <= 16 and copy.source.shape == copy.target.shape
        copy.target.copy_(copy.source)
    ends = [copy.name for copy in copies]
    assert ends == sorted(set(ends)) and ends[-1] == 120
    assert torch.equal(torch.from_numpy(bytes_B[:120]).view(torch.float32), values.flatten())
