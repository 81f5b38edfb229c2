"""Places of a receiver's copies, and the version that its engine gets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from weight_sync.protocol.copies.slots import Copies


@dataclass(frozen=True)
class Version:
    number: int


@pytest.fixture
def given_back() -> list[int]:
    return []


@pytest.fixture
def copies(given_back: list[int]) -> Copies[Version]:
    return Copies(lambda copy: given_back.append(copy.number))


def commit(copies: Copies[Version], number: int) -> None:
    copies.put_verified(Version(number))
    copies.commit(number)


def test_a_copy_is_taken_after_its_commit_and_the_same_one_if_asked_again(copies: Copies[Version]):
    copies.put_verified(Version(3))
    assert copies.take(serving=0) is None
    copies.commit(4)
    assert copies.take(serving=0) is None, "version 4 has not come"
    copies.commit(3)
    assert copies.committed_number == 3
    taken = copies.take(serving=0)
    assert taken == Version(3) and copies.take(serving=0) is taken


def test_the_newest_wins_unless_the_older_one_was_taken(copies: Copies[Version], given_back: list[int]):
    copies.put_verified(Version(1))
    copies.put_verified(Version(2))
    assert given_back == [1]
    copies.commit(1)
    assert copies.committed_number == 2, "the newer one that has replaced it"
    commit(copies, 3)
    assert given_back == [1, 2]
    assert copies.take(serving=0) == Version(3)
    commit(copies, 4)
    assert copies.take(serving=0) == Version(3), "it is being loaded"
    copies.finish_load(3, is_ok=True)
    assert copies.take(serving=3) == Version(4)
    assert given_back == [1, 2, 3]


def test_what_the_engine_serves_already_makes_room(copies: Copies[Version], given_back: list[int]):
    commit(copies, 3)
    copies.take(serving=0)
    commit(copies, 4)
    assert copies.take(serving=4) is None
    assert given_back == [3, 4]
    commit(copies, 5)
    copies.take(serving=4)
    assert copies.take(serving=5) is None
    assert given_back == [3, 4, 5]


def test_what_is_withdrawn_or_failed_waits_for_another_commit(copies: Copies[Version], given_back: list[int]):
    commit(copies, 3)
    copies.withdraw()
    assert (copies.committed_number, copies.newest_verified) == (0, 3)
    copies.commit(3)
    copies.take(serving=0)
    copies.finish_load(2, is_ok=False)
    assert copies.taken_number == 3
    copies.finish_load(3, is_ok=False)
    assert (copies.taken_number, copies.newest_verified, given_back) == (0, 3, [])
    assert copies.take(serving=0) is None


def test_what_is_given_up_makes_room_where_a_newer_one_is_here(
    copies: Copies[Version], given_back: list[int]
):
    commit(copies, 3)
    copies.put_verified(Version(4))
    copies.withdraw()
    assert (given_back, copies.newest_verified) == ([3], 4)
    copies.commit_verified()
    copies.take(serving=0)
    commit(copies, 5)
    assert copies.has(Version(4)) and not copies.has(Version(3))
    copies.release_copies()
    assert (given_back, copies.committed_number) == ([3, 4], 5)
