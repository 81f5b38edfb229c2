"""A publisher that was killed leaves its token and its current version to the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.errors import FencedError, SegmentGone
from asyncrl.core.staleness import PolicyVersion
from weight_sync.memory import segments
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.publisher_state import PublisherStateFile

LAYOUT = plan([TensorSpec("w", "float32", (16,))], 4096)
NUM_BYTES = LAYOUT.total_bytes


def commit(pool: SegmentPool, token: int, number: int) -> str:
    path = pool.acquire(token, NUM_BYTES)
    assert path is not None
    Path(path).write_bytes(bytes([number]) * NUM_BYTES)
    manifest = Manifest(PolicyVersion(number, number - 1), LAYOUT, (Bucket(NUM_BYTES, "0" * 32),))
    pool.commit(token, path, manifest)
    return path


def test_the_next_publisher_has_the_current_version_and_removes_the_rest(prefix):
    killed = SegmentPool(prefix, "7")
    commit(killed, 1, 1)
    current = commit(killed, 1, 2)
    killed.acquire(1, NUM_BYTES)
    pool = SegmentPool(prefix, "7")
    assert pool.current is not None and pool.current.bytes_B is not None
    assert pool.current.number == 2 and set(pool.current.bytes_B.tolist()) == {2}
    assert [path for path in segments.find(prefix) if path != str(PublisherStateFile(prefix).path)] == [
        current
    ]
    assert commit(pool, 1, 3) != current and pool.current.number == 3


def test_a_version_is_taken_over_once_as_the_second_publisher_may_have_died_of_it(prefix):
    commit(SegmentPool(prefix, "7"), 3, 1)
    second = SegmentPool(prefix, "7")
    assert second.current is not None
    third = SegmentPool(prefix, "7")
    assert third.current is None and third.token == 3
    commit(third, 3, 2)
    fourth = SegmentPool(prefix, "7")
    assert fourth.current is not None and fourth.current.number == 2, "a newer one is another matter"


def test_the_next_publisher_refuses_the_learners_that_were_refused_before(prefix):
    killed = SegmentPool(prefix, "7")
    commit(killed, 1, 1)
    killed.open(2)
    with pytest.raises(FencedError):
        SegmentPool(prefix, "7").open(1)


def test_a_segment_of_the_publisher_before_is_not_committed(prefix):
    killed = SegmentPool(prefix, "7")
    path = killed.acquire(1, NUM_BYTES)
    assert path is not None
    pool = SegmentPool(prefix, "7")
    manifest = Manifest(PolicyVersion(1, 0), LAYOUT, (Bucket(NUM_BYTES, "0" * 32),))
    with pytest.raises(SegmentGone):
        pool.commit(1, path, manifest)
    assert pool.acquire(1, NUM_BYTES) != path, "a name is never used twice"


@pytest.mark.parametrize("damage", [b"", b"\xff\xff", b"\x93\x01\x02\x03", b"\x81\xa5token\xa1x"])
def test_a_damaged_state_file_counts_as_nothing(prefix, damage):
    commit(SegmentPool(prefix, "7"), 1, 1)
    PublisherStateFile(prefix).path.write_bytes(damage)
    pool = SegmentPool(prefix, "7")
    assert pool.current is None
    commit(pool, 0, 1)


def test_a_publisher_that_ends_in_order_leaves_nothing(prefix):
    pool = SegmentPool(prefix, "7")
    commit(pool, 1, 1)
    pool.close()
    assert segments.find(prefix) == []
