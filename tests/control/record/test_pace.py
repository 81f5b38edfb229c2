"""The estimate of the time that is left."""

from __future__ import annotations

import random
from itertools import pairwise

from asyncrl.control.rows.pace import MIN_STEPS, Pace
from asyncrl.page.trends import FlowMeter


def estimates(pace: Pace, durations: list[float], steps: int) -> list[float]:
    now, found = 0.0, []
    pace.note(now, 0, is_working=True)
    for step, duration in enumerate(durations, 1):
        now += duration
        pace.note(now, step, is_working=True)
        if (left_s := pace.time_left_s(steps)) is not None:
            found.append(left_s)
    return found


def test_the_time_left_is_steady_over_uneven_steps_evaluations_and_a_checkpoint() -> None:
    chance = random.Random(0)
    durations = [chance.uniform(3.0, 9.0) + (40.0 if step % 25 == 0 else 0.0) for step in range(1, 301)]
    steady = estimates(Pace(), durations, 600)[30:]
    assert all(abs(later - earlier) < 0.15 * earlier for earlier, later in pairwise(steady))
    meter, now, rates = FlowMeter(), 0.0, []
    for step, duration in enumerate(durations, 1):
        now += duration
        rates.append(meter.update(now, {"steps": step}).get("steps", 0.0))
    jumps = [abs(one - other) / one for one, other in pairwise(rates[30:])]
    assert max(jumps) > 0.5, "the rate of the newest ten seconds jumps over the same steps"


def test_the_start_and_a_pause_are_no_pace() -> None:
    pace = Pace()
    found = estimates(pace, [90.0, 2.0, 2.0, 2.0, 2.0], 15)
    assert found == [22.0, 20.0], "the first step holds the start"
    now = 98.0
    for _ in range(100):
        now += 1.0
        pace.note(now, 5, is_working=False)
    assert pace.time_left_s(15) == 20.0


def test_there_is_no_estimate_before_some_steps_are_done_and_after_the_learner_went_back() -> None:
    pace = Pace()
    assert estimates(pace, [1.0] * MIN_STEPS, 10) == []
    assert estimates(Pace(), [1.0] * (MIN_STEPS + 1), 10) != []
    pace.note(100.0, 1, is_working=True)
    assert pace.time_left_s(10) is None
