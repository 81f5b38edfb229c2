"""Pictures of a file of rows: the choice of cases and values, and the names of lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.errors import DataError
from benchmarks.harness.rows import Row, RowFile
from benchmarks.reports.pictures import main, select
from benchmarks.reports.plots import MAX_LINES, MAX_PANELS, draw

ROWS = [
    Row("b", {"engine": engine, "sigma": sigma, "quick": 0}, {"step_s": 1.0, "idle": 0.5})
    for engine in ("scripted", "real")
    for sigma in (0.0, 1.0)
]


def test_cases_and_values_are_chosen_by_name() -> None:
    assert select(ROWS, (), {}) == ROWS
    chosen = select(ROWS, ("idle",), {"engine": "real", "sigma": "1.0"})
    assert chosen == [Row("b", {"engine": "real", "sigma": 1.0, "quick": 0}, {"idle": 0.5})]
    for text in ("1", "1.0", "1e0"):
        assert select(ROWS, ("idle",), {"engine": "real", "sigma": text}) == chosen, "numbers, not texts"
    for values, where in (
        ((), {"sigma": "one"}),
        ((), {"way": "None"}),
        (("no",), {}),
        ((), {"engine": "none"}),
    ):
        with pytest.raises(DataError, match="no row has such a case"):
            select(ROWS, values, where)


def test_a_truth_value_is_chosen_by_its_name_and_its_number() -> None:
    row = Row("b", {"quick": True, "size": "4"}, {"idle": 0.5})
    assert [row.is_of({"quick": text}) for text in ("True", "1", "0", "False")] == [True, True, False, False]
    assert not row.is_of({"size": "4.0"}), "a text is no number"


def test_a_spread_goes_with_its_value() -> None:
    row = Row("b", {}, {"idle": 0.5}).with_samples("step_s", [1.0, 2.0, 3.0, 4.0])
    chosen = select([row], ("idle",), {})
    RowFile.taken_here("b", chosen)
    assert chosen[0].spread == {} and chosen[0].counts == {}
    assert select([row], ("step_s",), {})[0].counts == {"step_s": 4}


def test_lines_are_named_by_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    labels: list[str] = []
    errorbar = Axes.errorbar
    monkeypatch.setattr(Axes, "errorbar", lambda *a, **k: labels.append(k["label"]) or errorbar(*a, **k))
    draw(ROWS, tmp_path / "p.png")
    assert set(labels) == {"engine scripted", "engine real"}, "all are of `quick` 0"


@pytest.mark.long
def test_what_there_is_no_room_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"value_{number}" for number in range(MAX_PANELS + 3)]
    many = [Row("b", {"x": x}, dict.fromkeys(names, 1.0)) for x in (1, 2)]
    assert draw(many, tmp_path / "p.png") == ["12 of 15 panels are drawn"]
    lines = [Row("b", {"x": x, "way": f"w{way}"}, {"s": 1.0}) for x in (1, 2) for way in range(MAX_LINES + 1)]
    assert draw(lines, tmp_path / "p.png") == ["b: s: 8 of 9 lines are drawn"]
    assert draw(ROWS, tmp_path / "p.png") == []
    RowFile.taken_here("b", many).write(tmp_path / "rows.json")
    assert main([str(tmp_path / "rows.json")]) == 0
    assert capsys.readouterr().err == "12 of 15 panels are drawn: choose with --values and --where\n"


def test_a_picture_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"p\.png cannot be written: No such file"):
        draw(ROWS, tmp_path / "no" / "p.png")


def test_the_command_draws_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RowFile.taken_here("b", ROWS).write(tmp_path / "rows.json")
    assert main([str(tmp_path / "rows.json"), "--where", "engine=real", "--values", "idle,step_s"]) == 0
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "rows.json"), "--where", "engine"])
    assert "is not of the form NAME=VALUE" in capsys.readouterr().err
