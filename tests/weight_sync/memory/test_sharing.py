"""Segments that processes of a node share: who maps one is never written to, who is gone keeps none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.core.errors import SegmentGone, SyncError
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.weight_sync.memory.test_shared_memory import commit, make_manifest, room_for
from weight_sync.memory import segments
from weight_sync.memory.manifest import ANY_VERSION
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.staging import Staged, open_tensors
from weight_sync.memory.staging_area import StagingArea
from weight_sync.protocol.copies.sharing import UNMAPPABLE
from weight_sync.protocol.messages import MapCopy
from weight_sync.receiving.inbound_rounds import InboundRounds
from weight_sync.receiving.receiver import ignore_bucket

READER = """
import mmap, os, sys
from weight_sync.memory import segments
mapping = segments.map_shared(sys.argv[1], sys.argv[2], 64)
os.unlink(sys.argv[2])
print(mapping[0], flush=True)
sys.stdin.read()
"""


def staging_of(prefix: str) -> StagingArea:
    return StagingArea(f"{prefix}{uuid.uuid4().hex[:6]}-", uuid.uuid4().hex)


def test_the_mark_of_a_node_is_the_first_that_was_left_there(prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SHM_DIR", tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    assert [segments.mark_node("run/", mark) for mark in ("a", "b", "a")] == ["a", "a", "a"]
    assert os.listdir(tmp_path / "run") == [segments.NODE_MARK]
    assert segments.mark_node("another/", "c") == "", "who cannot leave one shares nothing"


def test_a_mapped_copy_moves_no_byte_and_is_read_only(prefix):
    pool, staging = SegmentPool(f"{prefix}publisher-", "7"), staging_of(prefix)
    path = commit(pool, 1)
    assert pool.current is not None and pool.current.bytes_B is not None
    copy = staging.map_shared(make_manifest(1), pool.current.shared)
    assert os.path.samefile(copy.path, path) and copy.path != path
    copy.bytes_B[0] = 9
    assert pool.current.bytes_B[0] == 0, "the mapping is private"


def test_a_segment_is_not_written_to_while_somebody_has_mapped_it(prefix):
    """The learner is given another segment at once, whatever the reader does."""
    pool, staging = SegmentPool(f"{prefix}publisher-", "7", num_slots=2), staging_of(prefix)
    first = commit(pool, 1)
    copy = staging.map_shared(make_manifest(1), pool.current.shared)  # type: ignore[union-attr]
    second = commit(pool, 2)
    assert pool.describe() == ["mapped", "current"]
    third = pool.acquire(1, 64)
    assert third not in (None, first, second) and not os.path.exists(first)
    assert os.path.exists(copy.path), "its reader has a name for it"
    staging.give_back(copy)
    assert not os.path.exists(copy.path)


def test_of_free_segments_one_that_nobody_maps_is_written_to(prefix):
    pool, staging = SegmentPool(f"{prefix}publisher-", "7", num_slots=3), staging_of(prefix)
    commit(pool, 1)
    copy = staging.map_shared(make_manifest(1), pool.current.shared)  # type: ignore[union-attr]
    second = commit(pool, 2)
    commit(pool, 3)
    assert pool.acquire(1, 64) == second
    assert copy.number == 1


def test_a_copy_that_was_given_back_leaves_its_segment_to_the_publisher(prefix):
    pool, staging = SegmentPool(f"{prefix}publisher-", "7", num_slots=2), staging_of(prefix)
    first = commit(pool, 1)
    staging.give_back(staging.map_shared(make_manifest(1), pool.current.shared))  # type: ignore[union-attr]
    commit(pool, 2)
    assert pool.acquire(1, 64) == first


def test_what_an_engine_reads_is_not_written_to_even_if_its_receiver_is_gone(prefix):
    pool, staging = SegmentPool(f"{prefix}publisher-", "7", num_slots=2), staging_of(prefix)
    first, manifest = commit(pool, 1), make_manifest(1)
    copy = staging.map_shared(manifest, pool.current.shared)  # type: ignore[union-attr]
    tensors = list(open_tensors(Staged(manifest.version, copy.path, manifest)))
    staging.close()
    del copy
    commit(pool, 2)
    assert pool.acquire(1, 64) != first and tensors[0][1].tolist() == [0.0] * 16


def test_a_name_that_a_dead_receiver_left_keeps_its_segment_from_being_written_to(prefix):
    """An engine that was told of it may come yet; the receiver's successor removes the name."""
    pool, staging = SegmentPool(f"{prefix}publisher-", "7", num_slots=2), staging_of(prefix)
    first = commit(pool, 1)
    path = staging.map_shared(make_manifest(1), pool.current.shared).path  # type: ignore[union-attr]
    commit(pool, 2)
    assert pool.acquire(1, 64) != first and os.path.exists(path)


def test_a_dead_process_keeps_no_segment(prefix):
    pool = SegmentPool(f"{prefix}publisher-", "7", num_slots=2)
    first = commit(pool, 1)
    own = str(segments.SHM_DIR / f"{prefix}reader-1")
    command = [sys.executable, "-c", READER, pool.current.shared, own]  # type: ignore[union-attr]
    root = Path(__file__).parents[3]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    assert reader.stdout is not None and reader.stdout.readline().strip() == "0"
    commit(pool, 2)
    assert segments.is_read(first, num_names=2)
    reader.kill()
    reader.communicate()
    assert pool.acquire(1, 64) == first


def test_what_is_shared_no_more_is_not_mapped(prefix):
    """The name goes before the look for readers: who comes between finds no name, and lets go."""
    pool, staging = SegmentPool(f"{prefix}publisher-", "7", num_slots=2), staging_of(prefix)
    path = commit(pool, 1)
    shared = pool.current.shared  # type: ignore[union-attr]
    commit(pool, 2)
    opened = segments.attach(shared, 64)
    assert pool.acquire(1, 64) == path
    with pytest.raises(SegmentGone):
        staging.map_shared(make_manifest(1), shared)
    assert len(opened) == 64


def test_a_name_that_is_withdrawn_between_the_lock_and_the_look_is_gone(prefix, monkeypatch):
    path = segments.create(f"{prefix}a-1", 64)
    shared, attach = segments.share(path, 1), segments.attach

    def withdraw_behind(*args: int) -> object:
        mapping = attach(*args)  # type: ignore[arg-type]
        segments.unlink(shared)
        return mapping

    monkeypatch.setattr(segments, "attach", withdraw_behind)
    with pytest.raises(SegmentGone, match="no more"):
        segments.map_shared(shared, str(segments.SHM_DIR / f"{prefix}b-1"), 64)
    assert segments.find_names(prefix) == [path]


def test_a_name_that_is_taken_back_between_its_opening_and_the_lock_is_gone(prefix, monkeypatch):
    path = segments.create(f"{prefix}1", 4096)
    lock = segments.fcntl.flock

    def take_back_and_lock(fd: int, kind: int) -> None:
        segments.unlink(path)
        lock(fd, kind)

    monkeypatch.setattr(segments.fcntl, "flock", take_back_and_lock)
    with pytest.raises(SegmentGone, match="is gone"):
        segments.attach(path, 4096, segments.mmap.MAP_PRIVATE)


@pytest.mark.parametrize(
    ("number", "cause"), [(errno.ENOMEM, "refused"), (errno.EMFILE, "refused"), (errno.EXDEV, UNMAPPABLE)]
)
def test_a_process_without_room_says_nothing_of_what_it_could_map_later(prefix, monkeypatch, number, cause):
    shared, manifest = segments.share(segments.create(f"{prefix}a-1", 64), 1), make_manifest(1)
    told: list[Any] = []
    rounds = InboundRounds(
        staging_of(prefix),
        make_transport=lambda group: pytest.fail("no transport is wanted"),
        report=told.append,
        call_soon=lambda call: call(),
        on_bucket=ignore_bucket,
        on_end=lambda: None,
        bounds=ANY_VERSION,
        counters=Counter(),
        runtime=ThreadRuntime(),
    )

    def refuse(*_: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(segments.os, "link", refuse)
    rounds.map_copy(MapCopy(1, 1, shared), manifest.to_bytes())
    assert [event.cause.partition(":")[0] for event in told] == [cause]


def test_a_segment_of_another_run_or_size_is_not_mapped(prefix):
    staging, shared = staging_of(f"{prefix}run/"), segments.share(segments.create(f"{prefix}a-1", 64), 1)
    with pytest.raises(SyncError, match="not a segment of this run"):
        staging.map_shared(make_manifest(1), shared)
    with pytest.raises(SyncError, match="has 64 bytes"):
        staging_of(prefix).map_shared(make_manifest(1, num_floats=32), shared)


def test_a_copy_that_was_sent_is_shared_until_its_segment_is_needed(prefix):
    holder, mapper = staging_of(prefix), staging_of(prefix)
    first = room_for(holder, make_manifest(1))
    holder.put_verified(first)
    number, shared = holder.shared
    assert number == 1
    copy = mapper.map_shared(make_manifest(1), shared)
    mapper.put_verified(copy)
    assert mapper.shared == (0, ""), "a copy that is mapped is not handed on"
    holder.commit(1)
    holder.take(0)
    holder.finish_load(1, is_ok=True)
    assert holder.shared == (1, shared), "late joiners map it"
    assert room_for(holder, make_manifest(2)).path != first.path, "the mapper reads it"
    assert holder.shared == (0, "") and not os.path.exists(first.path)


def test_a_free_segment_is_written_to_again_once_nobody_maps_it(prefix):
    holder, mapper = staging_of(prefix), staging_of(prefix)
    first = room_for(holder, make_manifest(1))
    holder.put_verified(first)
    mapper.give_back(mapper.map_shared(make_manifest(1), holder.shared[1]))
    holder.commit(1)
    holder.take(0)
    holder.finish_load(1, is_ok=True)
    assert room_for(holder, make_manifest(2)).path == first.path


def test_who_maps_keeps_no_free_segments_and_no_base(prefix):
    pool, staging = SegmentPool(f"{prefix}publisher-", "7"), staging_of(prefix)
    keeper = StagingArea(f"{prefix}keeper-", "1", keeps_base=True)
    for area in (staging, keeper):
        area.put_verified(room_for(area, make_manifest(1)))
        area.commit(1)
        area.take(0)
        area.finish_load(1, is_ok=True)
    commit(pool, 2)
    for area in (staging, keeper):
        area.put_verified(area.map_shared(make_manifest(2), pool.current.shared))  # type: ignore[union-attr]
        assert len(segments.find(area._prefix)) == 1 and area.base_number == 0 and area.newest_verified == 2


def test_a_publisher_that_takes_over_shares_the_version_that_it_found(prefix):
    before = SegmentPool(f"{prefix}publisher-", "7")
    commit(before, 1)
    shared = before.current.shared  # type: ignore[union-attr]
    commit(before, 2)
    after = SegmentPool(f"{prefix}publisher-", "8")
    assert after.current is not None and after.current.number == 2 and not os.path.exists(shared)
    copy = staging_of(prefix).map_shared(make_manifest(2), after.current.shared)
    assert torch.equal(copy.bytes_B, torch.zeros(64, dtype=torch.uint8))
    after.close()
    assert segments.find_names(f"{prefix}publisher-") == []
