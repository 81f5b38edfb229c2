"""Copies that versions are brought into stripe by stripe: who writes to them, what the next offer finds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from asyncrl.core.errors import SyncError
from tests.weight_sync.sides import manifest_of
from weight_sync.memory.staging_area import StagingArea
from weight_sync.receiving.assembly import Assemblies


@pytest.fixture
def staging() -> Iterator[StagingArea]:
    area = StagingArea(f"asyncrl-{uuid.uuid4().hex[:8]}-", "1")
    yield area
    area.close()


@pytest.fixture
def assemblies(staging: StagingArea) -> Assemblies:
    return Assemblies(staging)


def test_rounds_of_one_version_write_to_one_copy_which_is_complete_with_the_last_of_them(assemblies):
    first = assemblies.join(1, manifest_of(1), 2)
    assert assemblies.join(2, manifest_of(1), 2) is first
    assert assemblies.verify(2, 1) is None
    assert assemblies.verify(1, 0) is first.copy


def test_a_stripe_that_is_here_stays_for_the_next_offer_of_its_version_alone(assemblies):
    first = assemblies.join(1, manifest_of(1), 2)
    assemblies.join(2, manifest_of(1), 2)
    assemblies.verify(1, 0)
    assemblies.leave(2)
    again = assemblies.join(3, manifest_of(1), 2)
    assert again is first and again.stripes == {0}
    assemblies.leave(3)
    newer = assemblies.join(4, manifest_of(2), 2)
    assert not newer.stripes and newer.copy.number == 2


def reserve(
    staging: StagingArea, assemblies: Assemblies, round_id: int, number: int, num_stripes: int = 1
) -> str:
    copy = assemblies.join(round_id, manifest_of(number), num_stripes).copy
    while not staging.reserve(copy):
        pass
    return copy.path


def test_a_copy_of_an_aborted_round_waits_for_its_writer(staging, assemblies):
    path = reserve(staging, assemblies, 5, 1)
    assemblies.abandon(5)
    assert reserve(staging, assemblies, 6, 2) != path
    assemblies.end_abandoned(5)
    assert reserve(staging, assemblies, 7, 3) == path


def test_a_copy_that_a_thread_may_still_write_to_takes_part_in_no_other_round(staging, assemblies):
    """Also for the version whose other stripe it holds: what is written late would pass for verified."""
    path = reserve(staging, assemblies, 1, 1, 2)
    assemblies.join(2, manifest_of(1), 2)
    assemblies.verify(1, 0)
    assemblies.abandon(2)
    other = assemblies.join(3, manifest_of(1), 2)
    assert other.copy.path != path and not other.stripes
    assemblies.end_abandoned(2)
    assert reserve(staging, assemblies, 4, 2) == path, "it is free again"


def test_a_copy_is_given_back_once_nobody_is_to_bring_more_of_it(staging, assemblies):
    path = reserve(staging, assemblies, 1, 1, 2)
    assemblies.join(2, manifest_of(1), 2)
    assemblies.leave(1)
    assemblies.leave(2)
    assert reserve(staging, assemblies, 3, 2, 2) == path


def test_a_copy_that_an_offer_of_another_version_replaced_is_given_back_with_its_last_round(
    staging, assemblies
):
    path = reserve(staging, assemblies, 1, 1, 2)
    assemblies.join(2, manifest_of(2), 2)
    assemblies.verify(1, 0)
    assert reserve(staging, assemblies, 3, 3, 2) == path


def test_no_room_for_a_copy_leaves_nothing_behind(assemblies, staging, monkeypatch):
    def refuse(_manifest: object) -> None:
        raise SyncError("no room")

    monkeypatch.setattr(staging, "make_room", refuse)
    with pytest.raises(SyncError, match="no room"):
        assemblies.join(1, manifest_of(1), 2)
    monkeypatch.undo()
    assert not assemblies.join(1, manifest_of(1), 2).stripes
