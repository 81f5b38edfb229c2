"""The trends of the soak benchmark, its verdict, and what one reading of a live process holds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.control.launch.handle import RunHandle
from asyncrl.control.launch.spec import RUN_VARIABLE
from asyncrl.control.record.rundir import RunDir
from asyncrl.service import SERVICE_VARIABLE
from benchmarks.soak import check, make_rows, table
from benchmarks.soak_parts.sampling import Sample, read_values
from benchmarks.soak_parts.trend import GIB, MIB, WEEK_S, find_trends

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
    json.dumps(values)
