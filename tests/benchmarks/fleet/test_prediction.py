"""The verdict of the prediction benchmark, and what it keeps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fleet.prediction import TOLD, check, make_rows, table


def cell(step_error: float, lag_error: float = 0.0, *, is_own: bool = False) -> dict[str, Any]:
    measured = dict.fromkeys(TOLD, 1.0)
    predicted = measured | {"step_s": 1.0 + step_error, "lag_mean": 1.0 + lag_error}
    return {
        "is_calibrated_here": is_own,
        "predicted": predicted,
        "measured": measured,
        "step_error": step_error,
        "lag_error": lag_error,
    }


def results(**cells: dict[str, Any]) -> dict[str, Any]:
    return {"cells": cells, "quick": False, "window_s": 25.0}


@pytest.mark.parametrize(
    ("step_error", "lag_error", "is_met"),
    [(0.14, 0.4, True), (-0.14, -0.4, True), (0.16, 0.0, False), (-0.16, 0.0, False), (0.0, -0.6, False)],
)
def test_step_time_and_lag_are_judged_in_both_directions(
    step_error: float, lag_error: float, is_met: bool
) -> None:
    assert check(results(one=cell(step_error, lag_error), own=cell(0.9, 9.0, is_own=True)))[0] == is_met


def test_the_speed_of_the_planner_is_judged() -> None:
    good = results(one=cell(0.0))
    fleet = {"num_events": 1.0, "num_steps": 1.0, "sampled_tokens": 1.0}
    assert check(good | {"fleet": fleet | {"processor_s": 59.0}})[0]
    assert not check(good | {"fleet": fleet | {"processor_s": 61.0}})[0]


def test_every_cell_is_told_and_kept_with_where_its_rates_are_from() -> None:
    found = results(one=cell(0.1), own=cell(0.0, is_own=True))
    assert len(table(found).splitlines()) == 3
    first, second = make_rows(found)
    assert first.case == {"cell": "one", "borrowed_rates": 1} and second.case["borrowed_rates"] == 0
    assert first.values["step_s_predicted"] == pytest.approx(1.1)
    assert first.values["step_s_measured"] == 1.0
