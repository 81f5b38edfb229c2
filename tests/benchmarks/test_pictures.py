"""What of a file of rows is drawn, and what tells its lines apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import DataError
from benchmarks.pictures import main, select
from benchmarks.plots import draw
from benchmarks.rows import Row, RowFile

ROWS = [
    Row("b", {"engine": engine, "sigma": sigma, "quick": 0}, {"step_s": 1.0, "idle": 0.5})
    for engine in ("scripted", "real")
    for sigma in (0.0, 1.0)
]


def test_cases_and_values_are_chosen_by_name() -> None:
    assert select(ROWS, (), {}) == ROWS
    chosen = select(ROWS, ("idle",), {"engine": "real", "sigma": "1.0"})
    assert chosen == [Row("b", {"engine": "real", "sigma": 1.0, "quick": 0}, {"idle": 0.5})]
    for values, where in ((("no",), {}), ((), {"engine": "none"})):
        with pytest.raises(DataError, match="no row has such a case"):
            select(ROWS, values, where)


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


def test_the_command_draws_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RowFile.taken_here("b", ROWS).write(tmp_path / "rows.json")
    assert main([str(tmp_path / "rows.json"), "--where", "engine=real", "--values", "idle,step_s"]) == 0
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "rows.json"), "--where", "engine"])
    assert "is not of the form NAME=VALUE" in capsys.readouterr().err
