"""The form that every benchmark's figures are kept in."""

import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.core.errors import DataError
from benchmarks.calibration import calibrate
from benchmarks.harness.figures import make_rows
from benchmarks.harness.options import TERMINATED, command_of, make_parser, report
from benchmarks.harness.rows import Row, RowFile, spread_of
from benchmarks.reports import comparison, pictures, suite
from benchmarks.reports.ratios import noise_of_median


def made_up() -> RowFile:
    row = Row.of("pipeline", {"max_lag": 4, "lengths": "fixed"}, {"step_s": [0.2, 0.4, 0.3], "idle": 0.5}, 7)
    return RowFile.taken_here("pipeline --quick", [row], {"every": [1, 2]})


def change(path: Path, **row: object) -> None:
    body = json.loads(path.read_text())
    body["rows"][0].update(row)
    path.write_text(json.dumps(body))


def test_what_was_written_is_what_is_read(tmp_path: Path):
    made_up().write(tmp_path / "a.json")
    found = RowFile.read(tmp_path / "a.json")
    assert found == made_up() or found.taken != made_up().taken
    assert found.rows == (
        Row(
            "pipeline",
            {"max_lag": 4, "lengths": "fixed"},
            {"step_s": 0.3, "idle": 0.5},
            {"step_s": pytest.approx(0.08)},
            7,
            {"step_s": 3},
        ),
    )
    assert found.figures == {"every": [1, 2]}
    assert found.hardware["cores"] and found.versions["torch"]


def test_the_spread_is_half_the_way_between_the_outer_tenths():
    assert spread_of([float(value) for value in range(11)]) == pytest.approx(4.0)
    assert spread_of([5.0, 5.0]) == 0.0


def test_a_row_with_samples_has_their_median_spread_and_number_and_nothing_of_what_was_there():
    before = Row.of("scale", {"replicas": 2}, {"step_s": [1.0, 9.0], "idle": [0.1, 0.3]}, 7)
    samples = [0.2, 0.4, 0.3, 0.5]
    after = before.with_samples("step_s", samples)
    assert after == Row.of("scale", {"replicas": 2}, {"step_s": samples, "idle": [0.1, 0.3]}, 7)
    assert before.counts == {"step_s": 2, "idle": 2}
    assert before.with_samples("step_s", [4.0]).spread.keys() == {"idle"}
    (numbered,) = (row for row in make_rows("x", {"a": [{"s": 1.0}, {"s": samples}]}) if "number" in row.case)
    assert numbered.counts == {"s": 4}


def test_a_file_without_counts_is_read(tmp_path: Path):
    made_up().write(tmp_path / "a.json")
    body = json.loads((tmp_path / "a.json").read_text())
    del body["rows"][0]["counts"]
    (tmp_path / "a.json").write_text(json.dumps(body))
    (row,) = RowFile.read(tmp_path / "a.json").rows
    assert (row.spread, row.counts) == ({"step_s": pytest.approx(0.08)}, {})


@pytest.mark.parametrize("num_samples", [4, 8, 30, 200])
def test_a_median_lies_within_its_noise_of_the_true_one_about_nineteen_times_in_twenty(num_samples: int):
    dice = random.Random(num_samples)
    draws = ([dice.gauss(1.0, 0.1) for _ in range(num_samples)] for _ in range(400))
    misses = [
        abs(statistics.median(samples) - 1.0) > noise_of_median(spread_of(samples), num_samples)
        for samples in draws
    ]
    assert 4 <= sum(misses) <= 32, "of 400, where 20 are expected; few samples are judged with more care"


def test_the_noise_of_a_median_is_that_of_student_s_quantile():
    assert noise_of_median(1.2816, 100) == pytest.approx(1.984 * 1.25 / 10, rel=0.03)
    assert noise_of_median(1.0, 400) == pytest.approx(noise_of_median(1.0, 100) / 2, rel=0.03)
    assert noise_of_median(0.0, 4) == 0.0


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path):
    made_up().write(tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()
    bad = RowFile.taken_here("x", [Row("x", {}, {"step_s": math.nan})])
    with pytest.raises(DataError, match="row 0: `step_s` is not a finite number"):
        bad.write(tmp_path / "a.json")
    with pytest.raises(TypeError):
        RowFile.taken_here("x", [], {"what": object()}).write(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"], "a part of a file was left"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"values": {"step_s": "fast"}}, "`step_s` is not a finite number"),
        ({"spread": {"other_s": 1.0}}, "a spread without a value: other_s"),
        ({"counts": {"idle": 3}}, "count of `idle` is not that of a spread"),
        ({"counts": {"step_s": 1}}, "count of `step_s` is not that of a spread: 1"),
        ({"counts": {"step_s": "many"}}, "count of `step_s`"),
        ({"case": {"max_lag": [4]}}, "case `max_lag` is neither"),
        ({"bench": ""}, "`bench` is not a name"),
        ({"seed": "one"}, "`seed` is not a whole number"),
        ({"more": 1}, "more"),
        ({"case": []}, "row 0: `case` is not a mapping but "),
        ({"values": 1.0}, "row 0: `values` is not a mapping but 1.0"),
        ({"counts": [3]}, "row 0: `counts` is not a mapping"),
    ],
)
def test_a_row_that_is_not_as_it_should_be_is_named(tmp_path: Path, row: dict[str, object], says: str):
    made_up().write(tmp_path / "a.json")
    change(tmp_path / "a.json", **row)
    with pytest.raises(DataError, match=says):
        RowFile.read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"hardware": []}, "`hardware` is not a mapping"),
        ({"versions": "none"}, "`versions` is not a mapping"),
        ({"figures": [1]}, "`figures` is not a mapping"),
        ({"command": 7}, "`command` is not text but 7"),
        ({"rows": 7}, "not iterable"),
    ],
)
def test_a_file_whose_parts_are_of_other_types_is_refused(tmp_path: Path, part: dict[str, object], says: str):
    made_up().write(tmp_path / "a.json")
    body = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps(body | part))
    with pytest.raises(DataError, match=says):
        RowFile.read(tmp_path / "a.json")


@pytest.mark.parametrize("place", ["no/a.json", "folder"])
def test_a_place_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path, place: str):
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=f"{place} cannot be written: "):
        made_up().write(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("place", ["no/a.json", "folder"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
):
    (tmp_path / "folder").mkdir()
    parsers = (
        make_parser("asyncrl bench ledger", None, "less").parse_args,
        comparison.main,
        suite.main,
        pictures.main,
    )
    commands = (["--json"], ["a", "b", "--plot"], ["--only", "none", "--plot"], ["a"])
    for parse, arguments in zip(parsers, commands, strict=True):
        with pytest.raises(SystemExit) as done:
            parse([*arguments, f"{tmp_path}/{place}"])
        assert done.value.code == 2
        assert f"{place}' cannot be written: " in capsys.readouterr().err.splitlines()[-1]


def test_the_command_that_is_kept_has_all_options_but_where_figures_go_and_whether_they_are_judged(
    tmp_path: Path,
):
    parser = make_parser("asyncrl bench weight_sync", None, "less")
    parser.add_argument("--bucket-bytes", type=int)
    for size in ("1048576", "4194304"):
        arguments = ["--json", f"{tmp_path}/a.json", "--bucket-bytes", size, "--quick", "--check"]
        report(parser.parse_args(arguments), {"us": 1.0}, str, lambda results: (True, "fine"))
        command = RowFile.read(tmp_path / "a.json").command
        assert command == f"weight_sync --bucket-bytes {size} --quick"
    assert command_of("all", ["--plot=a.png", "--only", "ledger"]) == "all --only ledger"
    assert command_of("calibrate", ["my run"]) == "calibrate 'my run'"


def test_what_is_no_file_of_rows_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be read"):
        RowFile.read(tmp_path / "none.json")
    (tmp_path / "old.json").write_text('{"benchmark": "pipeline"}')
    with pytest.raises(DataError, match="not a file of benchmark rows of format 1"):
        RowFile.read(tmp_path / "old.json")


def test_figures_of_any_shape_become_rows():
    figures = {
        "benchmark": "weight_sync",
        "machine": {"processor": "x86_64"},
        "quick": True,
        "residue": 0,
        "speeds": {"ours": [1.0, 3.0], "plain": 2.0},
        "rows": [
            {"num_bytes": 100, "transfer_s": [0.1, 0.2]},
            {"num_bytes": 400, "transfer_s": [0.4]},
            {"num_bytes": 400, "transfer_s": [0.5]},
        ],
        "engine": None,
    }
    whole, *parts = make_rows("weight_sync", figures)
    assert whole.case == {"quick": True}
    assert whole.values == {"residue": 0, "speeds/ours": 2.0, "speeds/plain": 2.0}
    assert whole.spread == {"speeds/ours": pytest.approx(0.8)}
    assert [row.case for row in parts] == [
        {"quick": True, "part": "rows", "num_bytes": 100},
        {"quick": True, "part": "rows", "num_bytes": 400},
        {"quick": True, "part": "rows", "num_bytes": 400, "number": 2},
    ]
    assert [row.values["transfer_s"] for row in parts] == [pytest.approx(0.15), 0.4, 0.5]


def test_every_benchmark_writes_rows_where_json_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = make_parser("asyncrl bench ledger", None, "less").parse_args(
        ["--quick", "--json", f"{tmp_path}/a.json"]
    )
    assert report(given, {"us_per_group": 3.5}, str, lambda results: (True, "fine")) == 0
    file = RowFile.read(tmp_path / "a.json")
    assert (file.command, file.rows) == ("ledger --quick", (Row("ledger", {}, {"us_per_group": 3.5}),))
    assert file.figures == {"us_per_group": 3.5}
    assert capsys.readouterr().out == "{'us_per_group': 3.5}\n"


ASKED_TO_END = """
import os, signal
from benchmarks.harness.options import end_on_sigterm
end_on_sigterm()
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    print("taken down", flush=True)
"""


def test_a_benchmark_that_is_asked_to_end_takes_down_what_it_has_started_however_often_it_is_asked():
    done = subprocess.run([sys.executable, "-c", ASKED_TO_END], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (TERMINATED, "taken down\n"), done.stderr


def test_what_has_no_targets_cannot_be_checked(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        calibrate.main(["--check"])
    assert "calibrate has no targets" in capsys.readouterr().err
