"""Record of a run: its data and its guard."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from pathlib import Path

import pytest

from asyncrl.control.record.history import read_history
from asyncrl.control.record.summary import NAMES, draw_curves, smooth, summarise
from asyncrl.control.rows.metering import Meter
from asyncrl.core.config.tree import Config
from asyncrl.core.status.statuses import Statuses
from benchmarks.harness.rows import Row
from benchmarks.reports.plots import draw
from tests.statuses import statuses_of

REQUIRED = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}


def make_row(step: int, **values: float) -> dict[str, float]:
    names = ("staleness/trained_tokens", "staleness/masked_tokens", "staleness/lag_mean", "timing_s/step")
    names += ("staleness/lag_max_trained", "perf/total_num_tokens", "timing_s/wait")
    names += ("perf/rollout_tokens_per_s", "perf/rollout_idle_share")
    return dict.fromkeys(names, 1.0) | {"training/global_step": step} | values


def test_smoothed_curves_follow_what_was_measured_and_swing_less() -> None:
    smoothed = smooth([0.0, 1.0] * 50)
    assert all(0.4 < value < 0.6 for value in smoothed[-10:])
    assert smooth([]) == [] and smooth([0.3]) == [0.3]


def test_curves_are_drawn_of_rows_that_lack_some(tmp_path: Path) -> None:
    row = {"training/global_step": 1, "timing_s/step": 1.0, "staleness/lag_max_trained": 0}
    draw_curves(read_history([row], NAMES), tmp_path / "curves.png", 4, "a run")
    assert (tmp_path / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("draws", ["a run", "rows"])
def test_a_machine_that_is_slow_to_draw_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws: str
) -> None:
    """matplotlib warns of a legend that took a second to place; in a supervisor that is no news."""
    seconds = itertools.count()
    monkeypatch.setattr("matplotlib.legend.time.perf_counter", lambda: 10.0 * next(seconds))
    if draws == "a run":
        draw_curves(read_history([make_row(1)], NAMES), tmp_path / "curves.png", 4, "a run")
    else:
        cases = [{"lag": lag, "way": way} for lag in range(3) for way in "xy"]
        draw([Row("b", case, {"step_s": 1.0}) for case in cases], tmp_path / "rows.png")
    assert next(seconds) > 1, "the clock was read"


def test_the_summary_holds_what_the_guard_counted_last() -> None:
    rows = [make_row(1, **{"guard/rollbacks": 0.0}), make_row(2, **{"guard/rollbacks": 1.0})]
    rows[1] |= {"guard/lr_scale": 0.5, "guard/is_kl_off": 0.0}
    assert summarise(read_history(rows, NAMES), Config(**REQUIRED), Statuses())["guard"] == {"rollbacks": 1.0}
    assert summarise(read_history([], NAMES), Config(**REQUIRED), Statuses())["guard"] == {}


def test_the_pass_is_that_of_the_last_prompt_drawn() -> None:
    drawn = (0, 1, 10, 11, 20, 21)
    statuses = [{"buffer.0": {"prompts_drawn": number, "num_prompts": 10}} for number in drawn]
    found = [Meter().update(1.0, statuses_of(status))["training/epoch"] for status in statuses]
    assert found == [0, 0, 0, 1, 1, 2]
    assert Meter().update(1.0, Statuses())["training/epoch"] == 0, "nobody has described the data yet"


def test_the_newest_row_of_a_step_counts_and_a_step_costs_bytes_not_a_dict() -> None:
    rows = [make_row(step, incarnation=0.0) for step in (1, 2, 3)] + [
        make_row(step, incarnation=1.0) for step in (2, 3)
    ]
    rows.append({"training/global_step": 3, "val-core/held_out/acc/mean@1": 0.5})
    rows.append({"training/global_step": 2, "val-core/held_out/acc/mean@1": 0.25})
    found = read_history(rows, ["incarnation", "unknown"])
    assert found["incarnation"].tolist() == [0.0, 1.0, 1.0] and len(found) == 3
    assert found.last is rows[4] and found.held_out == ((2, 0.25), (3, 0.5))
    assert all(math.isnan(value) for value in found["unknown"])
    rows_of_a_year = (make_row(step) for step in range(10_000))
    tracemalloc.start()
    read_history(rows_of_a_year, NAMES)
    assert tracemalloc.get_traced_memory()[1] < 10_000 * 600
    tracemalloc.stop()
