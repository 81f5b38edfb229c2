"""Rates out of rows: what a simulated run was fed with is found again in its rows."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from asyncrl.core.errors import ConfigError
from asyncrl.planner import calibration
from asyncrl.planner.calibration import (
    fit_line,
    fit_steps,
    lengths_of_rows,
    measure,
    rates_of_rows,
    steady_rows,
)
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import LengthsModel
from tests.planner.planner.runs import RATES, make_config, make_setting, rows_of, run


def test_the_rates_of_a_run_are_found_again_in_its_rows():
    setting = make_setting("staleness.max_lag=2")
    rows = rows_of(run(setting, steps=60))
    slower = Rates(decode=tuple((n, rate / 3) for n, rate in RATES.decode))
    found = rates_of_rows(rows, setting, slower)
    assert found.step_s == pytest.approx(RATES.step_s, rel=0.1)
    assert found.step_s_per_token == pytest.approx(RATES.step_s_per_token, rel=0.1)
    assert (found.publish_s, found.swap_s) == pytest.approx((RATES.publish_s, RATES.swap_s))
    for (_, told), (_, real) in zip(found.decode, RATES.decode, strict=True):
        assert told == pytest.approx(real, rel=0.1)


def test_the_cost_of_a_part_and_of_a_checkpoint_is_found_again_in_the_rows_of_a_run():
    real = replace(RATES, part_s=0.03, checkpoint_s=0.4, checkpoint_write_s=0.6)
    setting = make_setting("learner.stream=true", "learner.minibatches=1", "checkpoint.every_steps=5")
    found = rates_of_rows(rows_of(run(setting, real, steps=60)), setting, RATES)
    assert found.part_s == pytest.approx(real.part_s, rel=0.1)
    assert found.step_s == pytest.approx(real.step_s, rel=0.1)
    assert found.step_s_per_token == pytest.approx(real.step_s_per_token, rel=0.1)
    assert (found.checkpoint_s, found.checkpoint_write_s) == pytest.approx((0.4, 0.6))


def test_a_part_costs_neither_less_than_nothing_nor_more_than_all():
    tokens, more_parts = [1.0, 2.0, 3.0, 1.0], [1.0, 1.0, 2.0, 0.0]
    assert fit_steps(tokens, more_parts, [10.0, 12.0, 19.0, 5.0]) == pytest.approx((3.0, 2.0, 5.0))
    assert fit_steps(tokens, more_parts, [9.0, 11.0, 10.0, 12.0])[2] == 0.0  # - 3 per part
    assert fit_steps([1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 2.0, 1.0], [2.0, 4.0, 7.0, 0.0])[2] < 3.0  # 5 per part


def test_batches_of_one_part_tell_nothing_of_parts():
    assert fit_steps([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [3.0, 5.0, 7.0]) == (1.0, 2.0, None)
    assert fit_steps([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [3.0, 5.0, 7.0]) == (1.0, 2.0, None)
    rows = rows_of(run(make_setting("checkpoint.every_steps=50"), steps=12))
    found = rates_of_rows(rows, make_setting(), replace(RATES, part_s=0.7, checkpoint_s=0.3))
    assert (found.part_s, found.checkpoint_s) == (0.7, 0.3), "what no row tells is the base's"


def test_a_standstill_and_the_first_row_of_a_life_are_left_out():
    rows = [{"timing_s/step": 1.0} for _ in range(8)]
    rows += [
        {"timing_s/step": 100.0},
        {"timing_s/step": 1.0, "training/is_first_after_start": 1.0},
        {"val/id": 1.0},
    ]
    assert len(steady_rows(rows)) == 8


def test_too_few_rows_are_refused():
    with pytest.raises(ConfigError, match="4 steady steps are too few"):
        steady_rows([{"timing_s/step": 1.0}] * 4)


def test_a_line_has_neither_a_negative_start_nor_a_negative_slope():
    assert fit_line([1.0, 2.0], [2.0, 1.0]) == (1.5, 0.0)
    start, slope = fit_line([10.0, 20.0], [1.0, 5.0])
    assert start == pytest.approx(0.0)
    assert slope == pytest.approx(0.2)
    assert fit_line([5.0, 5.0], [1.0, 3.0]) == (2.0, 0.0)


def test_the_skew_of_lengths_is_told_by_the_longest_of_a_step():
    real, dice = LengthsModel(0.8, 100.0), random.Random(0)
    rows = []
    for _ in range(50):
        drawn = [real.draw(dice, 100_000) for _ in range(64)]
        rows.append({"response_length/mean": sum(drawn) / 64, "response_length/max": max(drawn)})
    found = lengths_of_rows(rows, 64, 100_000)
    assert found.sigma == pytest.approx(0.8, abs=0.12)
    assert found.median_tokens == pytest.approx(100.0, rel=0.12)


def test_groups_that_were_dropped_for_equal_rewards_count_as_sampled():
    row = dict.fromkeys(
        ["timing_s/wait", "perf/rollout_idle_share", "staleness/lag_mean", "staleness/masked_tokens"], 0.0
    )
    row |= {"timing_s/step": 1.0, "perf/total_num_tokens": 120.0, "staleness/trained_tokens": 100.0}
    rows = [
        row | {"training/global_step": step, "buffer/dropped/zero_variance": 8.0 * step}
        for step in range(1, 7)
    ]
    assert measure(rows, groups_per_step=8).sampled_per_s == pytest.approx(200.0)


def test_rates_are_read_as_they_were_written():
    assert Rates.of_values(json.loads(json.dumps(RATES.as_values()))) == RATES


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"decode": []},
        {"decode": [[1, 0]]},
        {"decode": [[1, float("nan")]]},
        {"decode": [[1, 2]], "speed": 3},
        {"decode": [[1, 2]], "swap_s": -1.0},
        {"decode": [[1, 2]], "swap_s": float("inf")},
        {"decode": [[1, 2]], "swap_s": "1"},
    ],
)
def test_what_are_no_rates_is_refused(values):
    with pytest.raises(ConfigError, match="rates"):
        Rates.of_values(values)


def test_the_decode_curve_is_met_at_its_points_and_flat_beyond_them():
    rates = Rates(decode=((1.0, 100.0), (4.0, 200.0)))
    assert [rates.token_rate(n) * n for n in (1, 4, 8)] == pytest.approx([100.0, 200.0, 200.0])
    assert 50.0 < rates.token_rate(2) < 100.0


def test_the_setting_of_a_run_has_the_fleet_of_its_rows():
    row = {"response_length/mean": 50.0, "response_length/max": 200.0, "prompt_length/mean": 7.0}
    rows = [row | {"training/global_step": step, "perf/rollout_replicas": 3.0} for step in range(6)]
    found = calibration.setting_of_rows(make_config(), rows)
    assert (found.replicas, found.prompt_tokens) == (3, 7.0)
