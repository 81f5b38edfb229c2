"""Segments, the publisher's pool, the receiver's staging and the views of a staged copy."""

from __future__ import annotations

import mmap
import os
import uuid

import pytest
import torch

from asyncrl.core.errors import FencedError, SegmentGone, SyncError
from asyncrl.core.staleness import PolicyVersion
from weight_sync.memory import pool as pool_module
from weight_sync.memory import segments, staging_area
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.staging import Staged, open_tensors
from weight_sync.memory.staging_area import Copy, StagingArea

PAGE = mmap.PAGESIZE


def make_manifest(number: int, num_floats: int = 16) -> Manifest:
    layout = plan([TensorSpec("w", "float32", (num_floats,))], 1 << 20)
    return Manifest(PolicyVersion(number, number - 1), layout, (Bucket(layout.total_bytes, "0" * 32),))


def commit(pool: SegmentPool, number: int, token: int = 1) -> str:
    path = pool.acquire(token, 64)
    assert path is not None
    pool.commit(token, path, make_manifest(number))
    return path


def test_a_segment_of_another_size_is_not_mapped(prefix):
    path = segments.create(f"{prefix}a", 128)
    assert len(segments.attach(path, 128)) == 128
    with pytest.raises(SyncError, match="has 128 bytes"):
        segments.attach(path, 64)


def test_a_segment_is_never_made_twice(prefix):
    segments.create(f"{prefix}a", 128)
    with pytest.raises(SyncError, match="exists"):
        segments.create(f"{prefix}a", 128)


def test_a_segment_without_room_is_an_error_and_leaves_nothing(prefix):
    with pytest.raises(SyncError, match="no room"):
        segments.create(f"{prefix}a", 1 << 50)
    assert segments.find(prefix) == []


def test_what_cannot_be_opened_mapped_shared_or_have_its_size_is_an_error_of_ours(prefix, tmp_path):
    with pytest.raises(SyncError, match="cannot open"):
        segments.attach(str(tmp_path), 64)
    with pytest.raises(SyncError, match="cannot map"):
        segments.attach(str(tmp_path), os.stat(tmp_path).st_size, mmap.MAP_PRIVATE)
    with pytest.raises(SyncError, match="no room"):
        segments.create(f"{prefix}a", -1, is_reserved=False)
    assert segments.find(prefix) == []
    assert segments.share(f"{segments.SHM_DIR}/{prefix}a", 1) == "", "there is none"


def test_a_segment_that_its_owner_takes_back_or_has_replaced_is_not_mapped(prefix, monkeypatch):
    path = segments.create(f"{prefix}a", 64)
    lock = segments.fcntl.flock
    with open(path, "rb") as owner, monkeypatch.context() as patch:
        lock(owner, segments.fcntl.LOCK_EX)
        with pytest.raises(SegmentGone, match="taken back"):
            segments.attach(path, 64, mmap.MAP_PRIVATE)

        def replace_and_lock(fd: int, kind: int) -> None:
            os.replace(segments.create(f"{prefix}b", 64), path)
            lock(owner, segments.fcntl.LOCK_UN)
            lock(fd, kind)

        patch.setattr(segments.fcntl, "flock", replace_and_lock)
        with pytest.raises(SegmentGone, match="is gone"):
            segments.attach(path, 64, mmap.MAP_PRIVATE)


def test_of_free_copies_no_more_than_two_are_kept(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex)
    copies = [room_for(staging, make_manifest(number)) for number in (1, 2, 3)]
    for copy in copies:
        staging.give_back(copy)
    assert segments.find(prefix) == sorted(copy.path for copy in copies[1:])


def test_unlink_all_removes_the_prefix_and_nothing_else(prefix):
    for name in (f"{prefix}a", f"{prefix}b"):
        segments.create(name, 64)
    other = segments.create(f"asyncrl-{uuid.uuid4().hex[:8]}-x", 64)
    assert segments.unlink_all(prefix) == 2
    assert segments.find(prefix) == [] and os.path.exists(other)
    segments.unlink(other)


def test_a_mapping_outlives_its_file(prefix):
    path = segments.create(f"{prefix}a", 64)
    mapping = segments.attach(path, 64)
    segments.unlink(path)
    mapping[0] = 7
    assert mapping[0] == 7


def test_a_staged_copy_is_read_without_copying_and_writes_stay_private(prefix):
    path = segments.create(f"{prefix}a", 64)
    shared = torch.frombuffer(segments.attach(path, 64), dtype=torch.float32)
    shared.fill_(2.5)
    manifest = make_manifest(1)
    ((name, tensor),) = open_tensors(Staged(manifest.version, path, manifest))
    assert name == "w" and tensor.tolist() == [2.5] * 16
    shared[1] = 3.5
    assert tensor[1] == 3.5
    tensor[0] = 9.0
    assert shared[0] == 2.5


def test_a_staged_copy_of_another_size_or_version_is_refused(prefix):
    path = segments.create(f"{prefix}a", 128)
    manifest = make_manifest(1)
    with pytest.raises(SyncError, match="has 128 bytes"):
        list(open_tensors(Staged(manifest.version, path, manifest)))
    with pytest.raises(SyncError, match="manifest of"):
        list(open_tensors(Staged(PolicyVersion(2, 1), path, manifest)))


def test_the_pool_never_gives_away_the_current_segment_or_one_in_transfer(prefix):
    pool = SegmentPool(prefix, "7", num_slots=2)
    first = commit(pool, 1)
    second = commit(pool, 2)
    assert second != first
    slot = pool.hold(1)
    assert slot is not None and slot.path == first
    assert pool.acquire(1, 64) is None
    pool.release(slot)
    assert pool.acquire(1, 64) == first


def test_a_version_just_replaced_can_still_be_sent_until_its_segment_is_needed(prefix):
    pool = SegmentPool(prefix, "7", num_slots=3)
    commit(pool, 1)
    commit(pool, 2)
    assert pool.acquire(1, 64) is not None
    slot = pool.hold(1)
    assert slot is not None
    pool.release(slot)


def test_what_was_overwritten_cannot_be_sent(prefix):
    pool = SegmentPool(prefix, "7", num_slots=2)
    commit(pool, 1)
    commit(pool, 2)
    pool.acquire(1, 64)
    assert pool.hold(1) is None


def test_an_older_token_is_refused_and_a_newer_one_gets_its_own_segment(prefix):
    pool = SegmentPool(prefix, "7")
    old = pool.acquire(1, 64)
    assert old is not None
    pool.open(2)
    with pytest.raises(FencedError):
        pool.acquire(1, 64)
    with pytest.raises(FencedError):
        pool.commit(1, old, make_manifest(1))
    new = pool.acquire(2, 64)
    assert new is not None and new != old and "t2-" in new


@pytest.mark.parametrize("number", [1, 2])
def test_a_number_must_rise(prefix, number):
    pool = SegmentPool(prefix, "7")
    commit(pool, 2)
    with pytest.raises(SyncError, match="does not rise"):
        commit(pool, number)


def test_the_same_commit_twice_is_one(prefix):
    pool = SegmentPool(prefix, "7")
    path = commit(pool, 1)
    pool.commit(1, path, make_manifest(1))
    with pytest.raises(SyncError, match="not acquired"):
        pool.commit(1, path, make_manifest(2))


def test_a_commit_of_another_size_is_refused_for_a_new_segment_and_for_a_used_one(prefix):
    pool = SegmentPool(prefix, "7", num_slots=2)
    for number in (1, 4):
        path = pool.acquire(1, 64)
        assert path is not None
        with pytest.raises(SyncError, match="has 64 bytes"):
            pool.commit(1, path, make_manifest(number, num_floats=32))
        for follower in (number, number + 1, number + 2):
            commit(pool, follower)


def room_for(staging: StagingArea, manifest: Manifest) -> Copy:
    copy = staging.make_room(manifest)
    while not staging.reserve(copy):
        pass
    return copy


def test_the_memory_of_a_copy_is_reserved_piece_by_piece(prefix, monkeypatch):
    """A segment without all of it is no room for another version."""
    monkeypatch.setattr(staging_area, "RESERVE_STEP_BYTES", 4096)
    staging, manifest = StagingArea(prefix, uuid.uuid4().hex), make_manifest(1, num_floats=2560)
    copy = staging.make_room(manifest)
    assert manifest.total_bytes == 10_240 and os.stat(copy.path).st_blocks == 0
    assert [staging.reserve(copy) for _ in range(3)] == [False, False, True] and staging.reserve(copy)
    assert os.stat(copy.path).st_blocks * 512 == 3 * 4096
    staging.give_back(copy)
    assert staging.make_room(make_manifest(2, num_floats=2560)).path == copy.path
    half = staging.make_room(make_manifest(3, num_floats=2560))
    staging.reserve(half)
    staging.give_back(half)
    assert half.path not in segments.find(prefix)
    assert staging.make_room(make_manifest(4, num_floats=2560)).path != half.path


def test_a_copy_that_the_engine_reads_is_not_reused_before_the_load_is_reported(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex)
    first = room_for(staging, make_manifest(1))
    staging.put_verified(first)
    assert staging.take(0) is None
    staging.commit(1)
    assert staging.take(0) is first and staging.take(0) is first
    second = room_for(staging, make_manifest(2))
    assert second.path != first.path
    staging.finish_load(1, is_ok=True)
    assert room_for(staging, make_manifest(3)).path == first.path


def test_what_a_process_that_is_thought_dead_may_still_read_is_never_written_again(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex)
    first = room_for(staging, make_manifest(1))
    staging.put_verified(first)
    staging.commit(1)
    assert staging.take(0) is first
    staging.quarantine()
    assert staging.take(0) is first, "its successor loads the same bytes"
    staging.finish_load(1, is_ok=True)
    assert room_for(staging, make_manifest(2)).path != first.path
    assert first.path not in segments.find(prefix)


def test_a_failed_load_loads_again_from_staging_and_a_newer_version_replaces_it(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex)
    staging.put_verified(room_for(staging, make_manifest(1)))
    staging.commit(1)
    copy = staging.take(0)
    staging.finish_load(1, is_ok=False)
    assert staging.take(0) is None
    staging.commit(1)
    assert staging.take(0) is copy
    newer = room_for(staging, make_manifest(2))
    staging.put_verified(newer)
    staging.finish_load(1, is_ok=False)
    staging.commit(1)
    assert staging.take(0) is newer


def test_a_restarted_receiver_removes_what_the_one_before_left(prefix):
    room_for(StagingArea(prefix, uuid.uuid4().hex), make_manifest(1))
    assert len(segments.find(prefix)) == 1
    StagingArea(prefix, uuid.uuid4().hex)
    assert segments.find(prefix) == []


def test_a_restarted_receiver_gives_its_copies_names_that_nobody_knows(prefix):
    """A replica loads what it was told of after its evaluation, and must not find another version there."""
    told = room_for(StagingArea(prefix, uuid.uuid4().hex), make_manifest(1)).path
    staging = StagingArea(prefix, uuid.uuid4().hex)
    assert told not in [room_for(staging, make_manifest(number)).path for number in (2, 3)]
    with pytest.raises(SegmentGone):
        segments.attach(told, make_manifest(1).total_bytes)


def test_a_withdrawn_commit_waits_for_another(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex)
    staging.put_verified(room_for(staging, make_manifest(1)))
    staging.commit(1)
    staging.withdraw()
    assert staging.take(0) is None and staging.newest_verified == 1
    staging.commit(1)
    assert staging.take(0) is not None


# Ahead of the learner, and for differences


def test_the_segments_of_the_next_versions_are_reserved_before_they_are_asked_for(prefix):
    pool = SegmentPool(prefix, "7", num_slots=3)
    current = commit(pool, 1)
    for _ in range(5):
        pool.prepare()
    paths = [path for path in segments.find(prefix) if os.path.getsize(path) == 64]
    assert len(paths) == 3
    assert pool.acquire(1, 64) in set(paths) - {current}


def test_a_large_segment_is_reserved_in_steps_and_the_learner_comes_again(prefix, monkeypatch):
    monkeypatch.setattr(pool_module, "ACQUIRE_STEP_BYTES", 2 * PAGE)
    monkeypatch.setattr(pool_module, "PREPARE_STEP_BYTES", PAGE)
    pool = SegmentPool(prefix, "7", num_slots=2)
    assert pool.acquire(1, 4 * PAGE) is None
    pool.prepare()  # nothing is current, so nobody knows what will be needed
    path = pool.acquire(1, 4 * PAGE)
    assert path is not None and os.path.getsize(path) == 4 * PAGE
    pool.commit(1, path, make_manifest(1, num_floats=PAGE))
    for size in (1, 2, 3, 4, 4):
        pool.prepare()
        (other,) = (found for found in segments.find(prefix) if found != path and "t1-" in found)
        assert os.path.getsize(other) == size * PAGE
    assert pool.acquire(1, 4 * PAGE) == other


def test_what_was_sent_last_stays_for_differences_to_it(prefix):
    pool = SegmentPool(prefix, "7", num_slots=3, keeps_sent=True)
    commit(pool, 1)
    slot = pool.hold(1)
    assert slot is not None
    pool.release(slot)
    pool.note_sent(slot)
    for number in range(2, 6):
        commit(pool, number)
        pool.prepare()
    assert pool.hold(1) is slot
    newer = pool.hold(5)
    assert newer is not None
    pool.note_sent(newer)
    pool.note_sent(slot)  # an older round that ended late
    pool.release(slot)
    pool.release(newer)
    for number in range(6, 9):
        commit(pool, number)
    assert pool.hold(1) is None
    assert pool.hold(5) is newer


def test_the_newest_verified_copy_stays_as_a_base_while_others_come_and_go(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex, keeps_base=True)
    for number in (1, 2, 3, 4):
        copy = room_for(staging, make_manifest(number))
        before = staging.find_base(number - 1, copy.manifest.layout)
        assert before is None if number == 1 else before is not None and before.path != copy.path
        staging.put_verified(copy)
        staging.commit(number)
        assert staging.take(number - 1) is copy
        staging.finish_load(number, is_ok=True)
        assert staging.base_number == number
    assert staging.find_base(3, make_manifest(3).layout) is None
    assert staging.find_base(4, make_manifest(4, num_floats=32).layout) is None
    assert len(segments.find(prefix)) == 2


def test_a_base_that_the_engine_reads_is_not_reused_when_a_newer_one_comes(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex, keeps_base=True)
    first = room_for(staging, make_manifest(1))
    staging.put_verified(first)
    staging.commit(1)
    assert staging.take(0) is first
    staging.put_verified(room_for(staging, make_manifest(2)))
    assert room_for(staging, make_manifest(3)).path != first.path
    staging.finish_load(1, is_ok=True)
    assert room_for(staging, make_manifest(4)).path == first.path


def test_without_delta_no_base_is_kept(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex)
    staging.put_verified(room_for(staging, make_manifest(1)))
    assert staging.base_number == 0


def test_a_copy_of_what_the_engine_serves_already_makes_room(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex)
    for _ in range(2):  # once more after a coordinator that did not know of the first
        staging.put_verified(room_for(staging, make_manifest(4)))
        staging.commit(4)
    assert staging.take(4) is None
    newer = room_for(staging, make_manifest(5))
    staging.put_verified(newer)
    staging.commit(5)
    assert staging.take(4) is newer


def test_a_copy_whose_load_is_not_heard_of_makes_room_once_the_engine_serves_it(prefix):
    staging = StagingArea(prefix, uuid.uuid4().hex)
    staging.put_verified(room_for(staging, make_manifest(4)))
    staging.commit(4)
    assert staging.take(3) is not None and staging.taken_number == 4
    newer = room_for(staging, make_manifest(5))
    staging.put_verified(newer)
    staging.commit(5)
    assert staging.take(4) is newer
