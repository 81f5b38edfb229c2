"""`asyncrl bench compare`, `plot` and `all`: from files of rows to ratios, pictures and one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.cli.commands.bench import BENCHMARKS
from asyncrl.errors import DataError
from benchmarks.comparison import compare, differences, main, read, table
from benchmarks.figures import make_rows
from benchmarks.plots import choose_axis, choose_panels
from benchmarks.rows import Row, RowFile
from benchmarks.suite import FULL, LEFT_OUT, QUICK, is_failure, run_all, run_alone
from benchmarks.suite import table as suite_table

VERL = """\
(TaskRunner pid=71) Training Progress:   0%|          | 0/8 [00:00<?, ?it/s]
(TaskRunner pid=71) step:1 - actor/entropy:9.5 - perf/throughput:10.0 - critic/score/mean:0.25
step:2 - actor/entropy:0.50 - perf/throughput:np.float64(200.0) - training/global_step:2
(TaskRunner pid=71) step:3 - actor/entropy:0.40 - perf/throughput:220.0 - timing_s/step:1e-01
step:4 - actor/entropy:0.30 - perf/throughput:210.0 - note:text - actor/lr:1e-06
validation step: nothing
"""


def row(step_s: Sequence[float] | float, **case: object) -> Row:
    return Row.of("pipeline", case, {"step_s": step_s})


def write(path: Path, *rows: Row) -> Path:
    RowFile.taken_here("pipeline", rows).write(path)
    return path


def test_a_ratio_within_the_noise_of_both_sides_is_not_a_difference():
    ones = [row([1.0, 1.2], max_lag=0), row([1.0, 1.2], max_lag=1), row(1.0, max_lag=2), row(3.0, max_lag=9)]
    others = [row([1.1, 1.3], max_lag=0), row([2.0, 2.1], max_lag=1), row(1.5, max_lag=2)]
    found = compare(ones, others)
    assert [ratio.verdict for ratio in found] == [
        "noise is larger",
        "differs",
        "measured once: noise unknown",
    ]
    assert found[0].ratio == pytest.approx(1.2 / 1.1)
    assert found[0].noise == pytest.approx(((0.08 / 1.1) ** 2 + (0.08 / 1.2) ** 2) ** 0.5)
    assert compare(ones, ones)[0].verdict == "equal"
    assert "| pipeline | max_lag 1 | step_s | 1.1 | 2.05 | 1.864 |" in table(found)


def test_the_command_prints_the_ratios_and_draws_them(tmp_path: Path):
    one = write(tmp_path / "a.json", row([1.0, 1.2], max_lag=0))
    other = write(tmp_path / "b.json", row([2.0, 2.2], max_lag=0))
    picture = tmp_path / "ratios.png"
    done = CliRunner().invoke(
        app, ["bench", "compare", str(one), str(other), "--plot", str(picture), "--json"]
    )
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)
    assert (found["ratio"], found["verdict"]) == (pytest.approx(2.1 / 1.1), "differs")
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


def test_verl_s_console_log_is_read_without_its_first_step(tmp_path: Path):
    (tmp_path / "verl.log").write_text(VERL)
    (found,) = read(tmp_path / "verl.log").rows
    assert found.values["perf/throughput"] == 210.0
    assert found.values["actor/entropy"] == 0.40
    assert found.values["timing_s/step"] == 0.1
    assert found.values["actor/lr"] == 1e-6
    assert "critic/score/mean" not in found.values and "note" not in found.values
    assert set(found.spread) == {"actor/entropy", "perf/throughput"}


def test_a_text_of_digits_and_signs_is_no_number(tmp_path: Path):
    lines = ["step:1 - a:1.2.3 - b:2 - c:- - d:-.5 - e:+3e-2 - f:e5 - g:1-2"] * 3
    (tmp_path / "verl.log").write_text("\n".join(lines))
    (found,) = read(tmp_path / "verl.log").rows
    assert found.values == {"b": 2.0, "d": -0.5, "e": 0.03}


def test_a_run_is_compared_with_verl_by_the_names_that_both_have(tmp_path: Path):
    (tmp_path / "verl.log").write_text(VERL)
    rows = [{"timing_s/step": 0.05 * step, "perf/throughput": 400.0, "buffer/x": 1} for step in range(1, 5)]
    text = "\n".join([*map(json.dumps, rows), '{"eval/accuracy": 0.5}', "torn"])
    (tmp_path / "metrics.jsonl").write_text(text)
    one, other = read(tmp_path / "verl.log"), read(tmp_path / "metrics.jsonl")
    found = {ratio.value: ratio for ratio in compare(one.rows, other.rows)}
    assert set(found) == {"perf/throughput", "timing_s/step"}
    assert found["perf/throughput"].ratio == pytest.approx(400 / 210)


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
    assert choose_panels([*rows, *make_rows("ledger", {"us": 1.0})]) == [
        ("pipeline", "step_s"),
        ("ledger", "us"),
    ]
    file = write(tmp_path / "a.json", *rows, *make_rows("ledger", {"us": 1.0}))
    done = CliRunner().invoke(app, ["bench", "plot", str(file)])
    assert (done.exit_code, done.stdout.strip()) == (0, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


class ScriptedBenchmarks:
    """Takes 70 s of a made-up clock per benchmark and writes one row; `failing` writes none."""

    def __init__(self, failing: str = "") -> None:
        self.time_s, self.failing, self.ran = 0.0, failing, []

    def now(self) -> float:
        return self.time_s

    def run(self, arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
        name, *flags = arguments
        self.ran.append((name, limit_s))
        self.time_s += 70.0
        if name == self.failing:
            return 1, "broken"
        write(Path(flags[flags.index("--json") + 1]), Row(name, {}, {"x": 1.0}))
        return 0, "figures\nworst ratio to a target: 1.50 (x)\n"


def test_all_quick_ends_within_its_five_minutes_and_says_what_it_left_out():
    scripted = ScriptedBenchmarks(failing="learner")
    results = run_all(QUICK, True, scripted.run, lambda line: None, scripted.now)
    assert [result.name for result in results] == list(QUICK)
    assert [bool(result.rows) for result in results] == [True, False, True, True, False, False]
    assert results[0].verdict == "worst ratio to a target: 1.50 (x)"
    assert results[1].verdict == "failed: broken"
    assert results[-1].verdict == "left out: 300 s are over"
    assert [limit_s for _, limit_s in scripted.ran] == [300.0, 230.0, 160.0, 90.0]
    assert [result.is_left_out for result in results] == [False] * 4 + [True] * 2
    assert not is_failure(results[-1], is_checked=True), "no time for a benchmark is no failure of it"
    assert is_failure(results[1], is_checked=False)
    assert suite_table(results).endswith("280 s in all")
    assert len(run_all(QUICK, False, scripted.run, lambda line: None, scripted.now)) == len(QUICK)


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
