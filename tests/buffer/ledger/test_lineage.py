"""The book of versions: as exact as a row for each version, and no larger after a million of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.ledger.facts import VersionBook
from asyncrl.buffer.ledger.snapshot import SNAPSHOT_VERSION, read_snapshot, write_snapshot
from asyncrl.buffer.ledger.state import LedgerState
from tests.buffer.ledger.parts.ledger_runs import SETTINGS


class Rows:
    """The same by a row for each version, as plainly as can be."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.book = VersionBook()

    def register(self, step: int) -> None:
        self.rows.append((self.book.lineage, step))
        self.book.register(len(self.rows), step)

    def counted_step(self, number: int) -> int:
        lineage, step = self.rows[number - 1]
        distance = 0
        for fork in self.book.forks[lineage:]:
            distance += max(0, step - fork)
            step = min(step, fork)
        return step - distance


LIVES = st.lists(
    st.tuples(st.lists(st.integers(1, 2), max_size=8), st.integers(0, 8), st.integers(0, 8)), max_size=5
)
"""Of each life: by how many steps each version is later than the one before; where it resumes, and forks."""


def grow(lives: list[tuple[list[int], int, int]]) -> Rows:
    found, step = Rows(), 0
    for gaps, resumed, fork in lives:
        for gap in gaps:
            found.register(step)
            step += gap
        found.book.begin_lineage()
        found.book.fork(fork)
        step = min(step, resumed)
    return found


@settings(deadline=None)
@given(LIVES)
def test_runs_of_versions_say_the_same_as_a_row_for_each(lives: list[tuple[list[int], int, int]]) -> None:
    found = grow(lives)
    numbers = range(1, len(found.rows) + 1)
    book = found.book
    assert [book.step_of(number) for number in numbers] == [step for _, step in found.rows]
    assert [book.is_abandoned(number) for number in numbers] == [
        lineage < book.lineage for lineage, _ in found.rows
    ]
    assert [book.counted_step(number) for number in numbers] == [*map(found.counted_step, numbers)]
    for low in numbers:
        for high in range(low, len(found.rows) + 1):
            lowest = min(found.counted_step(number) for number in range(low, high + 1))
            assert book.lowest_step((low, high)) == lowest


def test_a_long_life_takes_one_run_of_versions() -> None:
    book = VersionBook()
    for number in range(1, 10_001):
        book.register(number, number - 1)
    assert len(book.runs) == 1
    assert 10_000 in book and 0 not in book and 10_001 not in book
    with pytest.raises(AssertionError, match="never registered"):
        book.counted_step(10_001)


@settings(deadline=None)
@given(LIVES)
def test_a_snapshot_of_an_older_asyncrl_is_read(
    lives: list[tuple[list[int], int, int]],
) -> None:
    found = grow(lives)
    state = LedgerState(SETTINGS)
    state.versions = found.book
    new = write_snapshot(state)
    assert new["snapshot_version"] == SNAPSHOT_VERSION == 3
    rows = [[number, *row] for number, row in enumerate(found.rows, 1)]
    old = new | {"snapshot_version": 1, "versions": {"registered": rows, "forks": found.book.forks}}
    for values in (new, old):
        again = LedgerState(SETTINGS)
        read_snapshot(again, values)
        assert again.versions == found.book
