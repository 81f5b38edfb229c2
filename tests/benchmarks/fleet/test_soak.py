"""The trends of the soak benchmark, its verdict, and what one reading of a live process holds."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.run.handle import RunHandle
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.core.service import SERVICE_VARIABLE
from benchmarks.soak.sampling import Sample, read_values
from benchmarks.soak.soak import check, make_rows, table
from benchmarks.soak.trend import GIB, MIB, THINNED, WEEK_S, find_trends, written_steps

MEMORY = "memory_bytes/learner.0"


def sampled(values: list[float], label: str = MEMORY, every_s: float = 10.0) -> list[Sample]:
    return [Sample(every_s * i, i, {label: value}) for i, value in enumerate(values)]


def results_of(samples: list[Sample], *, is_quick: bool = False) -> dict:
    trends = [vars(trend) for trend in find_trends(samples)]
    part = {"steps": samples[-1].step, "seconds": samples[-1].at_s, "trends": trends}
    return {"quick": is_quick, "parts": {"scripted": part}}


def test_a_leak_is_told_for_a_week_and_misses_its_limit() -> None:
    """10 kB a second, in a soak of two hours."""
    results = results_of(sampled([500 * MIB + 1e5 * i for i in range(720)]))
    (trend,) = find_trends(sampled([500 * MIB + 1e5 * i for i in range(720)]))
    assert trend.week == pytest.approx(1e4 * WEEK_S, rel=0.01)
    assert trend.low <= trend.week <= trend.high
    is_met, verdict = check(results)
    assert not is_met and MEMORY in verdict
    assert MEMORY in table(results)
    (row,) = make_rows(results)
    assert row.values["per_week"] == trend.week


def test_memory_that_is_collected_now_and_then_does_not_grow() -> None:
    sawtooth = [500 * MIB + MIB * (i % 37) for i in range(720)]
    (trend,) = find_trends(sampled(sawtooth))
    assert trend.week == 0.0 and math.isinf(trend.ratio(is_shown=False))
    assert check(results_of(sampled(sawtooth)))[0]


def test_what_grows_at_the_beginning_alone_is_no_leak() -> None:
    assert check(results_of(sampled([min(i, 200) * MIB for i in range(720)])))[0]


def test_a_million_steps_end_the_week() -> None:
    """100 steps a second: a million take 10,000 s."""
    samples = [Sample(10.0 * i, 1000 * i, {MEMORY: 1e6 * i}) for i in range(720)]
    (trend,) = find_trends(samples)
    assert trend.week == pytest.approx(1e9, rel=0.01)
    assert trend.per_step == pytest.approx(1e3, rel=0.01)


def test_a_quick_soak_judges_what_its_interval_shows() -> None:
    """One jump of 20 MiB in 24 s is 500 GB a week, or the first use of a pool."""
    jump = sampled([(20 * MIB if i > 24 else 0) for i in range(48)], every_s=0.5)
    (trend,) = find_trends(jump)
    assert trend.week > 100 * GIB
    assert trend.ratio(is_shown=True) > trend.ratio(is_shown=False)
    leak = sampled([2 * MIB * i for i in range(48)], every_s=0.5)
    assert not check(results_of(leak, is_quick=True))[0]


SETTLED = 480
"""Samples of a soak of two hours after its first third."""
LIMIT = 8.0 * MIB
"""What memory may grow by in them: a GiB in a week."""
SEGMENT = 64.0 * MIB
TEETH = tuple(itertools.product((5, 17, 48, 96, 120), (0.0, 0.2, 0.5, 0.8)))
"""Periods, up to a quarter of the settled part, and phases."""


def leak(times: float) -> list[float]:
    """Return memory that grows by `times` as much as it may."""
    return [500 * MIB + times * LIMIT * i / SETTLED for i in range(720)]


def noise(height: float = 20.0 * MIB, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(0.0, height) for _ in range(720)]


def teeth(period: int, phase: float, height: float = SEGMENT) -> list[float]:
    return [height * ((i / period + phase) % 1.0) for i in range(720)]


def ratio_of(*parts: list[float]) -> float:
    (trend,) = find_trends(sampled([sum(values) for values in zip(*parts, strict=True)]))
    return trend.ratio(is_shown=False)


@pytest.mark.parametrize(("period", "phase"), TEETH)
def test_a_saw_tooth_alone_does_not_grow_and_hides_no_leak(period: int, phase: float) -> None:
    saw = teeth(period, phase)
    assert ratio_of(saw) > 10.0
    assert all(0.7 < times * ratio_of(leak(times), saw) < 1.4 for times in (2, 4, 8, 16, 64))
    assert ratio_of(leak(0.3), saw) > 1.0


@pytest.mark.parametrize(("period", "phase"), TEETH[4:])
def test_a_leak_on_a_saw_tooth_with_noise_is_found(period: int, phase: float) -> None:
    for seed, times in itertools.product(range(5), (4, 8, 16)):
        assert 0.5 < times * ratio_of(leak(times), teeth(period, phase), noise(2 * MIB, seed)) < 2.0


def test_a_leak_is_found_whatever_its_size_and_noise_is_none() -> None:
    for seed, times in itertools.product(range(5), (2, 4, 8, 64)):
        assert ratio_of(leak(times)) == pytest.approx(1 / times, rel=0.02)
        assert 0.5 < times * ratio_of(leak(times), noise(2 * MIB, seed)) < 2.0
        assert ratio_of(leak(0.0), noise(2 * MIB, seed)) > 10.0
        assert times < 8 or 0.5 < times * ratio_of(leak(times), noise(seed=seed)) < 2.0


def test_teeth_that_become_higher_grow_and_spikes_of_several_heights_do_not() -> None:
    higher = [value * (1 + i / 240) for i, value in enumerate(teeth(60, 0.3))]
    assert ratio_of(higher) < 1.0, "their peaks and medians rise, their troughs do not"
    spikes = [100.0 * MIB * (1 + i % 7) * (i % 101 == 0) for i in range(720)]
    assert ratio_of(spikes) > 10.0
    assert 0.7 < 4 * ratio_of(leak(4), spikes) < 1.4


def test_what_rises_after_the_last_of_many_falls_counts_once_it_is_higher_than_before() -> None:
    saw = teeth(48, 0.0)
    late = [
        SEGMENT / 2 * max(0, i - 600) / 48 for i in range(720)
    ]  # the last teeth do not fall to where they began
    assert ratio_of(saw, late) < 1.0


def test_a_saw_tooth_with_two_falls_is_told_as_what_it_may_be() -> None:
    """Nobody can tell yet whether it falls again: the last rise is longer than the others."""
    lengths = (300, 120, 300)
    values = [SEGMENT * i / 60 for length in lengths for i in range(length)]
    (trend,) = find_trends(sampled(values))
    assert trend.num_falls == 2 and trend.ratio(is_shown=False) < 1.0


def test_a_single_step_is_told_as_a_staircase_that_has_one_in_a_soak() -> None:
    for at in range(300, 700, 50):
        step = [14.0 * MIB * (i > at) for i in range(720)]
        assert 0.35 < ratio_of(step) < 1.5


def test_what_is_thinned_grows_by_no_less_than_told() -> None:
    """Each of the first 240 samples adds 0.1 MiB, each of as many again half of it, and so on."""
    thinned = list(itertools.accumulate(MIB / 10 / (1 + i // 240) for i in range(720)))
    (trend,) = find_trends(sampled(thinned))
    at_the_end = (thinned[-1] - thinned[-2]) / 10.0 * WEEK_S
    assert at_the_end < trend.week < 1.5 * at_the_end


@pytest.mark.parametrize(("num_bytes", "is_kept"), [(255 * MIB, True), (257 * MIB, False)])
def test_the_payloads_of_the_journal_are_judged_by_their_cap(num_bytes: float, is_kept: bool) -> None:
    """Their teeth are longer than a soak: a rise of 150 MiB to the end of one is no growth."""
    rise = [num_bytes - 150 * MIB * (1 - i / 719) for i in range(720)]
    results = results_of(sampled(rise, "file_bytes/buffer/payloads"))
    assert check(results)[0] is is_kept
    assert f"at most {num_bytes / MIB:.1f} MiB; cap 256 MiB" in table(results)
    (row,) = make_rows(results)
    assert row.values["highest"] == num_bytes


def test_what_tensorboard_gets_of_a_million_steps_is_told_by_its_own_rule() -> None:
    """6 kB for each step that is written, of a million after the last sample too."""
    written = written_steps(1_020_000)
    assert 60_000 < len(written) < 100_000, "of a million steps"
    steps = range(0, 20_000, 25)
    values = [6e3 * bisect.bisect_right(written, step) for step in steps]
    samples = [Sample(0.4 * step, step, {THINNED: value}) for step, value in zip(steps, values, strict=True)]
    (trend,) = find_trends(samples)
    week_steps = WEEK_S / 0.4
    until = min(samples[-1].step + 1_000_000, samples[-1].step + week_steps)
    expected = 6e3 * (bisect.bisect_right(written, until) - bisect.bisect_right(written, samples[-1].step))
    assert trend.week == pytest.approx(expected, rel=0.01)
    (by_steps,) = find_trends(sampled(values, "file_bytes/other"))
    assert by_steps.week > 3 * trend.week


def test_descriptors_that_leak_are_found() -> None:
    leak = [80.0 + i // 6 for i in range(720)]  # one in a minute: 10,080 in a week
    assert not check(results_of(sampled(leak, "descriptors/publisher.0")))[0]
    group = [80.0 + 16 * (i > 400) for i in range(720)]  # one more group, kept open
    assert check(results_of(sampled(group, "descriptors/publisher.0")))[0]


def test_a_service_that_left_has_no_trend_and_the_others_have() -> None:
    samples = [Sample(float(i), i, {MEMORY: 1.0} | ({"threads/x": 1.0} if i < 90 else {})) for i in range(99)]
    assert [trend.label for trend in find_trends(samples)] == [MEMORY]


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        find_trends(sampled([1.0] * 20))


def test_a_reading_has_each_process_and_file_of_the_run(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run")
    (folder.path / "logs").mkdir(parents=True)
    (folder.path / "logs" / "learner.0.log").write_bytes(bytes(10_000))
    folder.metrics.write_bytes(bytes(5_000))
    (folder.path / "buffer" / "payloads").mkdir(parents=True)
    (folder.path / "buffer" / "events.sqlite").write_bytes(bytes(20_000))
    (folder.path / "buffer" / "payloads" / "00000001.segment").write_bytes(bytes(30_000))
    code = "import time; held = b'x' * (64 << 20); print('ready', flush=True); time.sleep(60)"
    marks = {RUN_VARIABLE: "soakrun1", SERVICE_VARIABLE: "learner.0"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | marks, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        handle = RunHandle(folder, process.pid, "soakrun1", tmp_path / "sockets")
        values = read_values(handle)
    finally:
        process.kill()
        process.communicate()
    assert values["processes/run"] == 1
    (memory,) = (value for label, value in values.items() if label.startswith("memory_bytes/learner.0"))
    assert 64 * MIB < memory < 128 * MIB
    assert values["files/logs"] == 1 and values["file_bytes/logs"] >= 10_000
    assert values["file_bytes/metrics.jsonl"] >= 5_000
    assert (
        values["file_bytes/buffer/payloads"] >= 30_000 > values["file_bytes/buffer/events.sqlite"] >= 20_000
    )
    assert "file_bytes/buffer" not in values
    json.dumps(values)
