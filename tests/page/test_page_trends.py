"""Rates and curves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.page.trends import STEP, WINDOW_S, Curves, FlowMeter


def row(step: int, reward: float = 0.0) -> dict[str, float]:
    return {STEP: step, "critic/rewards/mean": reward, "staleness/lag_max_trained": float(step % 4)}


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3000), st.integers(2, 50))
def test_however_many_rows_come_the_curves_stay_short_and_reach_the_last(num_rows: int, most: int) -> None:
    curves = Curves(most)
    for step in range(1, num_rows + 1):
        curves.add(row(step))
    steps = curves.as_values()["steps"]
    assert len(steps) <= most and steps[-1] == num_rows and steps == sorted(set(steps))


def test_a_point_of_many_rows_shows_their_mean_and_the_largest_lag() -> None:
    curves = Curves(2)
    for step in range(1, 9):
        curves.add(row(step, reward=float(step)))
    found = curves.as_values()
    assert (found["steps"], found["reward"]) == ([4, 8], [2.5, 6.5])
    assert found["lag_max"] == [3.0, 3.0]


def test_steps_of_a_branch_that_a_resume_left_are_replaced() -> None:
    curves = Curves(10)
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)):
        curves.add(row(step, reward))
    curves.add_accuracy(2, 0.5)
    curves.add_accuracy(1, 0.4)
    found = curves.as_values()
    assert (found["steps"], found["reward"], found["accuracy"]) == ([1, 2], [0.1, 0.9], [[1, 0.4]])


def test_a_value_that_is_missing_or_not_finite_is_a_gap() -> None:
    curves = Curves()
    curves.add({STEP: 1})
    curves.add({STEP: 2, "critic/rewards/mean": float("nan")})
    curves.add(row(3, 1.0))
    assert curves.as_values()["reward"] == [None, None, 1.0]


def test_a_rate_is_of_the_last_seconds_only() -> None:
    meter = FlowMeter()
    for second in range(100):
        rates = meter.update(float(second), {"trained": 100.0 if second < 50 else 100.0 + (second - 50) * 4})
    assert rates == {"trained": 4.0}
    assert len(meter._past) <= WINDOW_S + 2


def test_a_counter_that_fell_begins_anew_and_no_rate_is_negative() -> None:
    meter = FlowMeter()
    meter.update(0.0, {"published": 50.0})
    assert meter.update(1.0, {"published": 2.0}) == {}
    assert meter.update(2.0, {"published": 3.0}) == {"published": 1.0}
