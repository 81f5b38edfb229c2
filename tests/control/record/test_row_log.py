"""The learner's own log of its rows: what it holds in memory and on disk, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.core.metrics.row_log import RowLog, paths_of, read_rows
from asyncrl.core.metrics.run_names import FIRST_AFTER_START

STEP = "training/global_step"


def row(step: int) -> dict[str, Any]:
    return {STEP: step, "text": "x" * 100}


def steps_on_disk(run_dir: Path) -> list[int]:
    return [found[STEP] for found in read_rows(run_dir)]


def test_rows_that_were_taken_are_forgotten_and_the_others_are_handed_over_again(tmp_path: Path) -> None:
    rows = RowLog(tmp_path)
    for step in (1, 2, 3):
        rows.add(row(step))
    assert rows.hand_over(0) == (0, [row(1), row(2), row(3)])
    assert rows.hand_over(2) == (2, [row(3)])
    assert rows.hand_over(0) == (2, [row(3)]), "a new supervisor learns which row it is given first"
    assert rows.hand_over(3) == (3, [])
    assert steps_on_disk(tmp_path) == [1, 2, 3]
    assert [found[FIRST_AFTER_START] for found in read_rows(tmp_path)] == [1, 0, 0]


def test_a_long_life_keeps_its_newest_rows_on_disk(tmp_path: Path) -> None:
    rows = RowLog(tmp_path, rotate_bytes=1000)
    for step in range(1, 101):
        rows.add(row(step))
        rows.hand_over(step - 1)  # the supervisor is one row behind
    found = steps_on_disk(tmp_path)
    assert found == list(range(found[0], 101)) and 5 < len(found) < 20
    assert all(path.stat().st_size <= 1200 for path in paths_of(tmp_path))


def test_rows_that_nobody_took_are_never_removed_from_the_disk(tmp_path: Path) -> None:
    rows = RowLog(tmp_path, rotate_bytes=1000)
    for step in range(1, 51):
        rows.add(row(step))
    assert steps_on_disk(tmp_path) == list(range(1, 51))
    rows.hand_over(10)
    for step in range(51, 101):
        rows.add(row(step))
    assert set(steps_on_disk(tmp_path)) >= set(range(11, 101)), "10 were taken"
    next_life = RowLog(tmp_path, rotate_bytes=1000)
    for step in range(101, 121):
        next_life.add(row(step))
    assert set(steps_on_disk(tmp_path)) >= set(range(11, 121)), "who was away reads it at the next life"
