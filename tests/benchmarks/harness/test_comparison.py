"""`asyncrl bench compare`, `plot` and `all`: from files of rows to ratios, pictures and one table."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.cli.commands.bench import BENCHMARKS
from asyncrl.core.errors import DataError
from asyncrl.core.metrics.registry import METRICS
from benchmarks.harness.figures import make_rows
from benchmarks.harness.rows import Row, RowFile
from benchmarks.reports import suite
from benchmarks.reports.comparison import (
    NOT_FIGURES,
    WITHIN_ONE_RUN,
    compare,
    differences,
    main,
    not_alike,
    read,
    table,
)
from benchmarks.reports.plots import MAX_SHOWN, bar_of, choose_axis, draw_ratios, order_panels
from benchmarks.reports.ratios import Ratio, noise_of_median
from benchmarks.reports.suite import (
    CLOSING_S,
    FULL,
    FULL_S,
    GRACE_S,
    LEFT_OUT,
    QUICK,
    is_failure,
    run_all,
    run_alone,
)
from benchmarks.reports.suite import table as suite_table

VERL = """\
(TaskRunner pid=71) Training Progress:   0%|          | 0/8 [00:00<?, ?it/s]
(TaskRunner pid=71) step:0 - val-core/openai/gsm8k/reward/mean@1:0.125
(TaskRunner pid=7) step:1 - actor/entropy:9 - perf/throughput:10.0 - critic/score/mean:0.25 - timing_s/step:9
step:2 - actor/entropy:0.50 - perf/throughput:np.float64(200.0) - training/global_step:2 - timing_s/step:0.1
(TaskRunner pid=71) step:3 - actor/entropy:0.40 - perf/throughput:220.0 - timing_s/step:1e-01
step:4 - actor/entropy:0.30 - perf/throughput:210.0 - note:text - actor/lr:1e-06 - timing_s/step:0.1
validation step: nothing
"""


def row(step_s: Sequence[float] | float, **case: object) -> Row:
    return Row.of("pipeline", case, {"step_s": step_s})


def write(path: Path, *rows: Row) -> Path:
    RowFile.taken_here("pipeline", rows).write(path)
    return path


def draw(dice: random.Random, num_samples: int, mean: float = 1.0) -> Row:
    return row([dice.gauss(mean, 0.1 * mean) for _ in range(num_samples)])


def test_a_difference_within_the_noise_of_both_medians_is_none():
    ones = [row([1.0, 1.1, 1.2, 1.1], max_lag=0), row([1.0, 1.1, 1.2, 1.1], max_lag=1), row(3.0, max_lag=9)]
    others = [row([1.1, 1.2, 1.3, 1.2], max_lag=0), row([2.0, 2.1, 2.0, 2.1], max_lag=1)]
    found = compare(ones, others)
    assert [ratio.verdict for ratio in found] == ["noise is larger", "differs"]
    assert found[0].ratio == pytest.approx(1.2 / 1.1)
    noise = noise_of_median(ones[0].spread["step_s"], 4)
    assert found[0].noise == pytest.approx(noise * 2**0.5), "both have the same spread"
    assert found[0].noise_share == pytest.approx(found[0].noise / 1.1)
    assert compare(ones, ones)[0].verdict == "equal"
    assert "| pipeline | max_lag 1 | step_s | 1.1 | 2.05 | 1.864 | 0." in table(found)


@pytest.mark.parametrize("num_samples", [4, 8, 30])
def test_two_measurements_of_the_same_thing_rarely_differ(num_samples: int):
    dice = random.Random(num_samples)
    pairs = [compare([draw(dice, num_samples)], [draw(dice, num_samples)]) for _ in range(200)]
    assert sum(ratio.verdict == "differs" for (ratio,) in pairs) <= 20


def test_a_tenth_more_at_a_tenth_of_noise_is_found_in_two_hundred_samples():
    dice = random.Random(0)
    pairs = [compare([draw(dice, 200)], [draw(dice, 200, 1.1)]) for _ in range(20)]
    assert [ratio.verdict for (ratio,) in pairs] == ["differs"] * 20


def test_too_few_samples_or_an_unknown_number_of_them_tell_no_difference():
    many = [1.0, 1.01, 1.02, 1.03]
    assert compare([row(many)], [row([2.0, 2.0, 2.1])])[0].verdict == "too few samples"
    assert compare([row([1.0, 1.0])], [row([2.0, 2.0])])[0].verdict == "too few samples"
    assert compare([row(many)], [row(1.5)])[0].verdict == "measured once: noise unknown"
    old = replace(row([2.0, 2.1, 2.0, 2.1]), counts={})
    (found,) = compare([row(many)], [old])
    assert (found.verdict, found.noise) == ("too few samples known: spread of unknown count", None)


def test_a_median_of_zero_has_no_ratio_and_its_noise_still_counts():
    swinging, still = row([-2.0, -1.0, 0.0, 1.0, 2.0]), row([0.0] * 5)
    (found,) = compare([swinging], [row([0.5] * 5)])
    assert (found.verdict, found.ratio, found.noise_share) == ("noise is larger", None, None)
    (found,) = compare([still], [row([0.5] * 5)])
    assert (found.verdict, found.ratio) == ("differs", None)
    assert compare([still], [still])[0].ratio == 1.0


def test_noise_counts_by_its_size_and_not_by_its_share_of_a_far_larger_median():
    (found,) = compare([row([1.0, 1.0, 1.01, 1.0])], [row([0.0, 10.0, 20.0, 10.0])])
    assert (found.verdict, found.ratio) == ("noise is larger", pytest.approx(10.0))
    (found,) = compare([row([10.0, 0.0, 20.0, 10.0])], [row([1.0, 1.0, 1.01, 1.0])])
    assert found.verdict == "noise is larger"


def test_the_bar_of_a_ratio_is_without_one_exactly_if_the_sides_differ(tmp_path: Path):
    dice = random.Random(1)
    means = [0.2, 0.8, 1.0, 1.1, 1.5, 5.0, 30.0, -2.0]
    found = [
        ratio for mean in means for _ in range(8) for ratio in compare([draw(dice, 6)], [draw(dice, 6, mean)])
    ]
    assert {ratio.verdict for ratio in found} == {"differs", "noise is larger"}
    for ratio in found:
        low, point, high = bar_of(ratio)
        assert -MAX_SHOWN <= low <= point <= high <= MAX_SHOWN
        assert (low <= 1 <= high) == (ratio.verdict == "noise is larger"), ratio
    far = [Ratio(row(1.0), "step_s", 1.0, 15.0, noise) for noise in (12.0, 16.0)]
    assert [bar_of(ratio) for ratio in far] == [(3.0, 10.0, 10.0), (-1.0, 10.0, 10.0)]
    draw_ratios([*compare([row([0.0] * 5)], [row([0.5] * 5)]), *found], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_the_ratios_and_draws_them(tmp_path: Path):
    one = write(tmp_path / "a.json", row([1.0, 1.1, 1.2], max_lag=0), row([1.0, 1.1, 1.1, 1.2], max_lag=1))
    other = write(tmp_path / "b.json", row([2.0, 2.1, 2.2], max_lag=0), row([2.0, 2.1, 2.1, 2.2], max_lag=1))
    picture = tmp_path / "ratios.png"
    done = CliRunner().invoke(
        app, ["bench", "compare", str(one), str(other), "--plot", str(picture), "--json"]
    )
    assert done.exit_code == 0, done.output
    few, enough = json.loads(done.stdout)
    assert (few["ratio"], few["verdict"]) == (pytest.approx(2.1 / 1.1), "too few samples")
    assert (enough["ratio"], enough["verdict"]) == (pytest.approx(2.1 / 1.1), "differs")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_files_without_a_common_case_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = write(tmp_path / "a.json", row(1.0, max_lag=0))
    other = write(tmp_path / "b.json", row(1.0, max_lag=1))
    assert main([str(one), str(other)]) == 1
    assert "no case is in both" in capsys.readouterr().err


def test_another_machine_or_version_is_said(tmp_path: Path):
    one = read(write(tmp_path / "a.json", row(1.0)))
    body = json.loads((tmp_path / "a.json").read_text())
    body["hardware"]["cores"], body["versions"]["torch"] = 64, "1.0"
    (tmp_path / "b.json").write_text(json.dumps(body))
    hardware, versions = differences(one, read(tmp_path / "b.json"))
    assert "cores" in hardware and "and 64" in hardware
    assert versions.startswith("versions differ: torch ") and versions.endswith("and 1.0")
    assert list(differences(one, one)) == []


def test_noise_of_the_steps_of_one_run_each_is_said_to_be_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    steps, turns = row([1.0, 1.1, 1.1, 1.2]), Row.of("ledger", {}, {"us": [1.0, 1.1, 1.1, 1.2]})
    log = "\n".join(f"step:{number} - timing_s/step:1.{number}" for number in range(1, 8))
    (tmp_path / "verl.log").write_text(log)
    cases = {
        "pipeline": (write(tmp_path / "a.json", steps), True),
        "a log": (tmp_path / "verl.log", True),
        "ledger": (write(tmp_path / "b.json", turns), False),
        "single figures": (write(tmp_path / "c.json", row(1.0)), False),
    }
    for name, (path, is_said) in cases.items():
        assert main([str(path), str(path)]) == 0
        assert (WITHIN_ONE_RUN in capsys.readouterr().err) == is_said, name


def test_other_work_is_said(tmp_path: Path):
    ones = [replace(row(1.0, max_lag=lag), seed=lag) for lag in (0, 1, 2)]
    others = [replace(row(1.0, max_lag=lag), seed=7) for lag in (0, 1)]
    one = read(write(tmp_path / "a.json", *ones))
    RowFile.taken_here("pipeline --quick", others).write(tmp_path / "b.json")
    assert list(differences(one, read(tmp_path / "b.json"))) == [
        "commands differ: 'pipeline' and 'pipeline --quick'",
        "seeds differ in 2 of 2 cases: 0 and 7; 1 and 7",
        "cases of one side only: 1 of A, 0 of B",
    ]
    assert not list(differences(one, one))


def test_a_machine_of_which_nothing_is_known_is_said(tmp_path: Path):
    (tmp_path / "verl.log").write_text(VERL)
    one, log = read(write(tmp_path / "a.json", row(1.0))), read(tmp_path / "verl.log")
    unknown = "nothing is known of A's machine, versions and command: it is a log of verl"
    assert list(differences(log, one)) == [unknown]
    assert list(differences(log, log)) == [unknown, unknown.replace("A's", "B's")]
    bare = replace(one, hardware={"machine": "x86_64"})
    assert list(differences(one, bare)) == ["nothing is known of B's machine"]


def test_verl_s_console_log_is_read_without_the_first_step_that_trained(tmp_path: Path):
    (tmp_path / "verl.log").write_text(VERL)
    (found,) = read(tmp_path / "verl.log").rows
    assert found.values["perf/throughput"] == 210.0
    assert found.values["actor/entropy"] == 0.40
    assert found.values["timing_s/step"] == 0.1
    assert found.values["actor/lr"] == 1e-6
    assert "critic/score/mean" not in found.values and "note" not in found.values
    assert set(found.spread) == {"actor/entropy", "perf/throughput", "timing_s/step"}
    assert found.counts["perf/throughput"] == 3
    assert found.values["val-core/openai/gsm8k/reward/mean@1"] == 0.125, "evaluation before training stays"


def test_a_text_of_digits_and_signs_is_no_number(tmp_path: Path):
    lines = ["step:1 - a:1.2.3 - b:2 - c:- - d:-.5 - e:+3e-2 - f:e5 - g:1-2"] * 3
    (tmp_path / "verl.log").write_text("\n".join(lines))
    (found,) = read(tmp_path / "verl.log").rows
    assert found.values == {"b": 2.0, "d": -0.5, "e": 0.03}


def test_a_run_is_compared_with_verl_by_the_names_that_mean_the_same_in_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "verl.log").write_text(VERL)
    rows = [
        {"timing_s/step": 0.05, "perf/throughput": 400.0, "buffer/x": 1, "actor/entropy": 0.4, "time": 1.7e9}
        for _ in range(4)
    ]
    text = "\n".join([*map(json.dumps, rows), '{"eval/accuracy": 0.5}', "torn"])
    (tmp_path / "metrics.jsonl").write_text(text)
    one, other = read(tmp_path / "verl.log"), read(tmp_path / "metrics.jsonl")
    found = {ratio.value: ratio for ratio in compare(one.rows, other.rows, not_alike(one, other))}
    assert set(found) == {"actor/entropy", "timing_s/step"}
    assert found["timing_s/step"].ratio == pytest.approx(0.5)
    (*_, last) = differences(one, other)
    assert last == "perf/throughput is left out: a run's is per learner rank, verl's per GPU of the whole job"
    assert "perf/throughput" in {ratio.value for ratio in compare(one.rows, one.rows, not_alike(one, one))}
    main([str(tmp_path / "verl.log"), str(tmp_path / "metrics.jsonl")])
    printed = capsys.readouterr()
    assert "perf/throughput" not in printed.out and last in printed.err


def test_the_first_step_after_a_resume_is_left_out_of_a_run(tmp_path: Path):
    times = {1: 60.0, 2: 1.0, 3: 1.0, 4: 50.0, 5: 1.0, 6: 1.0}
    rows = [
        {"timing_s/step": step_s, "training/is_first_after_start": float(step_s > 1)}
        for step_s in times.values()
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (found,) = read(tmp_path / "metrics.jsonl").rows
    assert (found.values, found.counts) == ({"timing_s/step": 1.0}, {"timing_s/step": 4})


def test_clocks_and_counters_of_a_log_are_no_figures(tmp_path: Path):
    names = [
        "time",
        "training/global_step",
        "training/epoch",
        "training/is_first_after_start",
        "weights/rounds",
    ]
    rows = [{"timing_s/step": 1.0, "guard/lr_scale": 1.0} | dict.fromkeys(names, step) for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (found,) = read(tmp_path / "metrics.jsonl").rows
    assert set(found.values) == {"timing_s/step", "guard/lr_scale"}
    counters = [metric.name for metric in METRICS if " so far" in metric.meaning]
    assert len(counters) > 10
    assert [name for name in counters if not NOT_FIGURES.fullmatch(name)] == []
    kept = [
        "timing_s/step",
        "weights/transfer_s",
        "checkpoint/write_s",
        "actor/lr",
        "training/x",
        "buffer/depth",
    ]
    assert not any(map(NOT_FIGURES.fullmatch, kept))


def test_what_is_none_of_the_forms_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("nothing of the kind")
    with pytest.raises(DataError, match="no line of the form 'step:N"):
        read(tmp_path / "a.txt")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "none")


def test_a_picture_has_the_number_that_takes_most_values_on_its_axis(tmp_path: Path):
    rows = [row(1.0 / (1 + lag), max_lag=lag, sigma=sigma) for lag in (0, 1, 4) for sigma in (0.5, 1.0)]
    assert choose_axis(rows) == "max_lag"
    assert choose_axis(rows[:1]) is None
    assert order_panels([*rows, *make_rows("ledger", {"us": 1.0})]) == [
        ("pipeline", "step_s"),
        ("ledger", "us"),
    ]
    file = write(tmp_path / "a.json", *rows, *make_rows("ledger", {"us": 1.0}))
    done = CliRunner().invoke(app, ["bench", "plot", str(file)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


class ScriptedBenchmarks:
    """Takes 70 s of a made-up clock per benchmark and writes one row; `failing` writes none."""

    def __init__(self, failing: str = "", seconds: float = 70.0) -> None:
        self.time_s, self.failing, self.seconds, self.ran = 0.0, failing, seconds, []

    def now(self) -> float:
        return self.time_s

    def run(self, arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
        name, *flags = arguments
        self.ran.append((name, limit_s))
        self.time_s += self.seconds
        if name == self.failing:
            return 1, "broken"
        write(Path(flags[flags.index("--json") + 1]), Row(name, {}, {"x": 1.0}))
        return 0, "figures\nworst ratio to a target: 1.50 (x)\n"


def test_all_quick_ends_within_its_five_minutes_and_says_last_what_it_left_out():
    scripted = ScriptedBenchmarks(failing="learner")
    results = run_all(QUICK, True, scripted.run, lambda line: None, scripted.now)
    assert [result.name for result in results] == list(QUICK)
    assert [bool(result.rows) for result in results] == [True, False, True, True, False, False]
    assert results[0].verdict == "worst ratio to a target: 1.50 (x)"
    assert results[1].verdict == "failed: broken"
    assert results[-1].verdict == "left out: 300 s are nearly over"
    began = [0.0, 70.0, 140.0, 210.0]
    assert [start + limit_s for start, (_, limit_s) in zip(began, scripted.ran, strict=True)] == [275.0] * 4
    assert GRACE_S + CLOSING_S == 25.0, "one that does not end when it is asked to is ended before 300 s"
    assert [result.is_left_out for result in results] == [False] * 4 + [True] * 2
    *_, total, last = suite_table(results).splitlines()
    assert total == "280 s in all"
    assert last == ("not measured: learner (failed), weight_sync (no time), rollout (no time)")


def test_the_file_of_all_keeps_what_was_asked_for_and_every_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scripted = ScriptedBenchmarks(failing="learner")
    monkeypatch.setattr(suite, "run_alone", scripted.run)
    monkeypatch.setattr(suite, "end_on_sigterm", lambda: None)
    assert suite.main(["--quick", "--only", "ledger,learner", "--json", f"{tmp_path}/a.json"]) == 1
    file = RowFile.read(tmp_path / "a.json")
    assert file.command == "all --quick --only ledger,learner"
    assert file.figures["verdicts"] == {
        "ledger": {"code": 0, "verdict": "worst ratio to a target: 1.50 (x)"},
        "learner": {"code": 1, "verdict": "failed: broken"},
    }


def test_what_was_left_out_is_a_failure_where_targets_are_checked():
    scripted = ScriptedBenchmarks(failing="learner")
    results = run_all(QUICK, True, scripted.run, lambda line: None, scripted.now)
    assert is_failure(results[-1], is_checked=True), "a target that nobody measured is not met"
    assert not is_failure(results[-1], is_checked=False), "no time for a benchmark is no failure of it"
    assert is_failure(results[1], is_checked=False)
    assert not is_failure(results[0], is_checked=True)


def test_all_without_quick_has_time_for_every_benchmark():
    scripted = ScriptedBenchmarks()
    results = run_all(QUICK, False, scripted.run, lambda line: None, scripted.now)
    assert all(result.rows for result in results)
    assert suite_table(results).endswith(f"{70 * len(QUICK)} s in all")
    slow = ScriptedBenchmarks(seconds=FULL_S / 2)
    late = run_all(["ledger", "learner", "buffer"], False, slow.run, lambda line: None, slow.now)
    assert [result.is_left_out for result in late] == [False, False, True]


def test_all_runs_every_benchmark_or_says_that_it_does_not():
    of_files = {"all", "compare", "plot", "sync"}  # they measure nothing, or what another one does
    assert {*FULL, *LEFT_OUT} == BENCHMARKS.keys() - of_files
    assert not {*FULL} & {*LEFT_OUT}


def test_a_benchmark_over_its_time_is_asked_to_end_before_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = tmp_path / "asked"
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\ntrap 'echo yes > {said}; exit 143' TERM\nsleep 60 & wait\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    assert run_alone(["ledger"], 0.5) == (1, "did not end within 0 s")
    assert said.read_text() == "yes\n"
