"""Snapshots of a learner rank: what they hold, which are kept, and what happens to a version without one."""

from __future__ import annotations

import threading

import pytest
import torch

from asyncrl.core.errors import DeadlineExceeded
from tests.weight_sync.direct.members import RUNTIME, WAIT_S
from weight_sync.direct.party import UNDER_WAY, Superseded
from weight_sync.direct.snapshot import Snapshots
from weight_sync.memory.parts import Part
from weight_sync.rectangles.packs import Pack
from weight_sync.rectangles.parcels import Parcel
from weight_sync.rectangles.rectangle import Rectangle

ROWS = 2 * UNDER_WAY


def take(snapshots: Snapshots, number: int, live_RC: torch.Tensor, dtype: str = "float32") -> bool:
    live_RC.fill_(number)
    return snapshots.take(
        number, [Part("w", (ROWS, 4), 0, 0, live_RC)], {"w": dtype, "of another rank": "int8"}
    )


def packs(dtype: torch.dtype = torch.float32) -> list[Pack]:
    size = 4 * dtype.itemsize
    parcels = [Parcel("w", Rectangle((i, 0), (i + 1, 4)), size, 0, (0,)) for i in range(ROWS)]
    return [Pack(0, (0,), (parcel,), (0,), size) for parcel in parcels]


def pack_of(rectangle: Rectangle) -> Pack:
    num_bytes = 4 * rectangle.num_elements
    return Pack(0, (0,), (Parcel("w", rectangle, num_bytes, 0, (0,)),), (0,), num_bytes)


def until(seconds: float = WAIT_S) -> float:
    return RUNTIME.now() + seconds


@pytest.fixture
def live_RC() -> torch.Tensor:
    return torch.zeros(ROWS, 4)


def test_a_snapshot_has_the_bytes_of_its_time_in_the_published_dtype(live_RC):
    snapshots = Snapshots(RUNTIME)
    assert take(snapshots, 1, live_RC, "bfloat16")
    assert snapshots.regions == [("w", Rectangle((0, 0), (ROWS, 4)))]
    assert snapshots.dtypes == {"w": "bfloat16"}
    live_RC.fill_(9)
    reading = snapshots.open(1, packs(torch.bfloat16), until())
    for index in range(ROWS):
        assert reading.pack(index).view(torch.bfloat16).tolist() == [1.0] * 4


def test_packs_hold_until_as_many_more_were_read_as_may_be_under_way(live_RC):
    snapshots = Snapshots(RUNTIME)
    live_RC[:] = torch.arange(ROWS)[:, None]
    assert snapshots.take(1, [Part("w", (ROWS, 4), 0, 0, live_RC)], {"w": "float32"})
    reading = snapshots.open(1, packs(), until())
    read = [reading.pack(index) for index in range(UNDER_WAY)]
    for index in range(UNDER_WAY, ROWS):
        assert float(read[0].view(torch.float32)[0]) == index - UNDER_WAY
        read = [*read[1:], reading.pack(index)]


def test_packs_that_lie_in_the_snapshot_as_they_travel_are_not_copied(live_RC):
    snapshots, norm = Snapshots(RUNTIME), torch.full((3,), 7.0)
    parts = [Part("w", (ROWS, 4), 0, 0, live_RC), Part("norm", (3,), 0, 0, norm.reshape(3, 1))]
    assert snapshots.take(1, parts, {"w": "float32", "norm": "bfloat16"})
    last_rows = Parcel("w", Rectangle((ROWS - 2, 0), (ROWS, 4)), 32, 0, (0,))
    behind = Parcel("norm", Rectangle((0,), (3,)), 6, 0, (0,))
    run = Pack(0, (0,), (last_rows, behind), (0, 32), 38)
    reading = snapshots.open(1, [run, pack_of(Rectangle((0, 1), (ROWS, 3)))], until())
    memory = snapshots._slots[0].holders["norm[0:, 0:]"].untyped_storage()
    found = [reading.pack(index).untyped_storage().data_ptr() for index in range(2)]
    assert [address == memory.data_ptr() for address in found] == [True, False]
    assert reading.pack(0)[32:].view(torch.bfloat16).tolist() == [7.0] * 3


@pytest.mark.parametrize(
    "pack",
    [
        pack_of(Rectangle((0, 0), (2, 4))),
        pack_of(Rectangle((0, 0), (ROWS, 4))),
        pack_of(Rectangle((ROWS - 2, 0), (ROWS, 2))),
    ],
    ids=["of another order", "past the end of the memory", "of some columns"],
)
def test_a_pack_is_copied_unless_it_lies_in_one_piece(pack):
    snapshots = Snapshots(RUNTIME)
    rows = torch.arange(ROWS, dtype=torch.float32)[:, None].expand(ROWS, 4)
    parts = [Part("w", (ROWS, 4), row, 0, rows[row : row + 1]) for row in reversed(range(ROWS))]
    assert snapshots.take(1, parts, {"w": "float32"})
    found = snapshots.open(1, [pack], until()).pack(0).view(torch.float32)
    assert found.tolist() == rows[pack.parcels[0].rectangle.slices].reshape(-1).tolist()


def test_a_transfer_that_finds_no_memory_for_its_packs_holds_no_copy(live_RC):
    snapshots, huge = Snapshots(RUNTIME), Pack(0, (0,), packs()[0].parcels, (1 << 60,), 1 << 61)
    for number in (1, 2):
        assert take(snapshots, number, live_RC)
        reading = snapshots.open(number, [huge], until())
        with pytest.raises(RuntimeError):
            reading.pack(0)
        reading.close(is_whole=False)
    assert take(snapshots, 3, live_RC)
    assert not any(slot.num_readers for slot in snapshots._slots)


def test_a_snapshot_that_is_being_sent_is_never_overwritten(live_RC):
    snapshots = Snapshots(RUNTIME)
    assert take(snapshots, 1, live_RC)
    first = snapshots.open(1, packs(), until())
    assert take(snapshots, 2, live_RC)
    second = snapshots.open(2, packs(), until())
    assert not take(snapshots, 3, live_RC), "both copies are being sent"
    for number, reading in ((1, first), (2, second)):
        assert reading.pack(0).view(torch.float32).tolist() == [number] * 4
    with pytest.raises(Superseded, match="version 3 was not kept"):
        snapshots.open(3, packs(), until())
    first.close(is_whole=False)
    assert take(snapshots, 4, live_RC)
    assert second.pack(1).view(torch.float32).tolist() == [2] * 4
    with pytest.raises(Superseded, match="version 1 was not kept, the newest is 4"):
        snapshots.open(1, packs(), until())


def test_a_snapshot_that_two_read_is_kept_until_both_have_ended(live_RC):
    snapshots = Snapshots(RUNTIME)
    assert take(snapshots, 1, live_RC)
    readings = [snapshots.open(1, packs(), until()) for _ in range(2)]
    readings[0].close(is_whole=True)
    assert take(snapshots, 2, live_RC)
    assert readings[1].pack(0).view(torch.float32).tolist() == [1] * 4


def test_a_copy_that_is_being_overwritten_is_no_version(live_RC):
    snapshots = Snapshots(RUNTIME)
    assert take(snapshots, 1, live_RC)
    assert snapshots._find_room() is snapshots._slots[0], "what `take` writes into from here on"
    with pytest.raises(Superseded, match="version 1 was not kept"):
        snapshots.open(1, packs(), until())


def test_without_a_transfer_there_is_one_copy(live_RC):
    snapshots = Snapshots(RUNTIME)
    for number in (1, 2, 3):
        assert take(snapshots, number, live_RC)
    assert len(snapshots._slots) == 1
    snapshots.open(3, packs(), until()).close(is_whole=True)
    with pytest.raises(Superseded):
        snapshots.open(2, packs(), until())


def test_a_version_that_is_yet_to_be_taken_is_waited_for(live_RC):
    snapshots, found = Snapshots(RUNTIME), []
    thread = threading.Thread(target=lambda: found.append(snapshots.open(2, packs(), until())))
    thread.start()
    assert take(snapshots, 1, live_RC)
    assert take(snapshots, 2, live_RC)
    thread.join(WAIT_S)
    assert found[0].pack(0).view(torch.float32).tolist() == [2] * 4


def test_a_version_that_does_not_come_is_waited_for_until_the_deadline(live_RC):
    snapshots = Snapshots(RUNTIME)
    assert take(snapshots, 1, live_RC)
    with pytest.raises(DeadlineExceeded, match="version 2 was not taken in time"):
        snapshots.open(2, packs(), until(0.05))


def test_parts_that_lie_elsewhere_are_copied_from_where_they_lie(live_RC):
    snapshots, other_RC = Snapshots(RUNTIME), torch.zeros(ROWS, 4)
    assert take(snapshots, 1, live_RC)
    assert take(snapshots, 2, other_RC)
    assert snapshots.open(2, packs(), until()).pack(0).view(torch.float32).tolist() == [2] * 4


def test_the_newest_version_that_was_sent_is_kept_as_the_base_of_differences(live_RC):
    snapshots = Snapshots(RUNTIME, keeps_sent=True)
    assert take(snapshots, 1, live_RC)
    snapshots.open(1, packs(), until()).close(is_whole=True)
    for number in (2, 3):
        assert take(snapshots, number, live_RC), "2 was not sent, and goes"
    reading = snapshots.open(3, packs(), until(), base=1)
    for index in range(ROWS):
        values = [reading.pack(index), reading.base(index), reading.pack(index)]
        assert [float(one.view(torch.float32)[0]) for one in values] == [3, 1, 3]
    assert take(snapshots, 4, live_RC), "a copy more than without differences"
    assert not [one for one in snapshots._slots if one.number == 1 and not one.num_readers]
    reading.close(is_whole=True)
    assert take(snapshots, 5, live_RC)
    assert {slot.number for slot in snapshots._slots} == {3, 4, 5}, "1 is no base any more"


def test_what_was_not_sent_whole_does_not_replace_the_base(live_RC):
    snapshots = Snapshots(RUNTIME, keeps_sent=True)
    assert take(snapshots, 1, live_RC)
    snapshots.open(1, packs(), until()).close(is_whole=True)
    assert take(snapshots, 2, live_RC)
    snapshots.open(2, packs(), until(), base=1).close(is_whole=False)
    assert take(snapshots, 3, live_RC)
    assert snapshots.open(3, packs(), until(), base=1).base(0) is not None


def test_a_base_that_is_not_here_or_lies_elsewhere_is_none(live_RC):
    snapshots = Snapshots(RUNTIME, keeps_sent=True)
    assert snapshots.take(1, [Part("w", (ROWS, 4), 1, 0, live_RC[1:])], {"w": "float32"})
    snapshots.open(1, [], until()).close(is_whole=True)
    assert take(snapshots, 2, live_RC)
    for base in (0, 1, 7):
        assert snapshots.open(2, packs(), until(), base=base).base(0) is None
