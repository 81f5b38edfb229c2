"""Views of a watched run: throttled lines where stdout is no terminal, a panel painted in place."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from asyncrl.cli.live import LEGEND
from asyncrl.cli.views import LINE_S, PAINT_S, LineView, PanelView, view_on
from tests.page import page_runs
from tests.runtimes import ManualClock
from tests.statuses import snapshot_of


def make_snapshot(step: int) -> dict[str, Any]:
    return page_runs.make_snapshot(step=step) | {"events": []}


class Terminal(io.StringIO):
    """A stream that counts what is written."""

    def isatty(self) -> bool:
        return True


def show_for(view: Any, clock: ManualClock, seconds: float, pulse_s: float = 0.25) -> None:
    for number in range(int(seconds / pulse_s)):
        view.show(snapshot_of(make_snapshot(step=100 + number)))
        clock.advance(pulse_s)


def test_steps_are_one_line_per_ten_seconds_and_the_last_one_is_always_told() -> None:
    stream, clock = io.StringIO(), ManualClock()
    view = LineView(stream, clock)
    show_for(view, clock, 35.0)
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["quickstart: running", LEGEND]
    assert [line.split("  ")[0] for line in lines[2:]] == [
        f"step {100 + int(4 * at)}/600" for at in (0.0, LINE_S, 2 * LINE_S, 3 * LINE_S, 34.75)
    ]


def test_a_line_holds_what_changed_since_the_one_before() -> None:
    stream, clock = io.StringIO(), ManualClock()
    view = LineView(stream, clock)
    view.show(snapshot_of(make_snapshot(step=100)))
    clock.advance(LINE_S)
    view.show(snapshot_of(make_snapshot(step=100) | {"step": 101}))
    first, second = stream.getvalue().splitlines()[2:]
    assert "accuracy 0.812" in first and "Bottleneck: the replicas" in first
    assert second == "step 101/600"


def test_a_field_that_has_ended_is_a_dash_once() -> None:
    stream, clock = io.StringIO(), ManualClock()
    view = LineView(stream, clock)
    for step in (100, 101, 102):
        view.show(
            snapshot_of(
                make_snapshot(step=100) | {"step": step} | ({} if step == 100 else {"time_left_s": None})
            )
        )
        clock.advance(LINE_S)
    assert stream.getvalue().splitlines()[3:] == ["step 101/600  left \u2013", "step 102/600"]


def test_a_state_or_a_phase_is_told_at_once_and_once() -> None:
    stream, clock = io.StringIO(), ManualClock()
    view = LineView(stream, clock)
    for phase in ("starting Ray", "starting Ray", "the learner loads its weights"):
        view.show(snapshot_of({"run": "x", "state": "starting", "phase": phase}))
    assert stream.getvalue().splitlines() == [
        "x: starting (starting Ray)",
        "x: starting (the learner loads its weights)",
    ]


def test_where_a_run_goes_on_is_told_once() -> None:
    stream = io.StringIO()
    view = LineView(stream, ManualClock())
    for step in (100, 101):
        view.show(snapshot_of(make_snapshot(step=step) | {"resumed_step": 99}))
    assert stream.getvalue().count("resumed at step 99, residue 0") == 1


@pytest.fixture
def panel(monkeypatch: pytest.MonkeyPatch) -> tuple[PanelView, Terminal, ManualClock]:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), ManualClock()
    return PanelView(stream, clock), stream, clock


def test_the_panel_writes_only_lines_that_changed_at_most_once_a_second(
    panel: tuple[PanelView, Terminal, ManualClock],
) -> None:
    view, stream, clock = panel
    view.show(snapshot_of(make_snapshot(step=100)))
    whole = len(stream.getvalue())
    clock.advance(PAINT_S / 2)
    view.show(snapshot_of(make_snapshot(step=101)))
    assert len(stream.getvalue()) == whole
    clock.advance(PAINT_S)
    view.show(snapshot_of(make_snapshot(step=100) | {"accuracy": 0.9}))
    assert 0 < len(stream.getvalue()) - whole < whole / 4, "one line changed"


def test_a_hundred_seconds_of_the_panel_are_less_than_100_kilobytes(
    panel: tuple[PanelView, Terminal, ManualClock],
) -> None:
    view, stream, clock = panel
    show_for(view, clock, 100.0)
    view.close()
    assert len(stream.getvalue().encode()) < 100_000


def screen_of(written: str) -> list[str]:
    """Return what a terminal shows of the escape sequences that the panel uses."""
    rows: list[str] = [""]
    at = 0
    for part in written.replace("\x1b[2K", "\x00").replace("\x1b[J", "\x01").split("\n"):
        while part.startswith("\x01") or re.match(r"\x1b\[\d+A\r", part):
            if part.startswith("\x01"):
                rows[at:], part = [""], part[1:]
            else:
                number, part = part[2:].split("A\r", 1)
                at -= int(number)
        if part.startswith("\x00"):
            rows[at] = part[1:]
        at += 1
        rows += [""] * (at + 1 - len(rows))
    return rows


def test_painting_in_place_shows_what_a_whole_drawing_would(
    panel: tuple[PanelView, Terminal, ManualClock],
) -> None:
    view, stream, clock = panel
    snapshots = [
        make_snapshot(step=100) | {"resumed_step": 99, "phase": "the last evaluation"},
        make_snapshot(step=150),
        make_snapshot(step=151) | {"error": "it broke"},
    ]
    for snapshot in snapshots:
        view.show(snapshot_of(snapshot))
        clock.advance(PAINT_S)
    again = Terminal()
    PanelView(again, ManualClock()).show(snapshot_of(snapshots[-1]))
    shown, whole = screen_of(stream.getvalue()), screen_of(again.getvalue())
    assert [line for line in shown if line] == [line for line in whole if line]


def test_a_stream_that_is_no_terminal_gets_lines() -> None:
    assert isinstance(view_on(io.StringIO()), LineView) and isinstance(view_on(Terminal()), PanelView)


def test_a_panel_keeps_the_last_figures_while_only_the_head_answers(
    panel: tuple[PanelView, Terminal, ManualClock],
) -> None:
    view, stream, clock = panel
    view.show(snapshot_of(make_snapshot(step=150)))
    before = screen_of(stream.getvalue())
    clock.advance(PAINT_S)
    view.show(snapshot_of({"run": "quickstart", "state": "stopping", "phase": "ending Ray"}))
    after = screen_of(stream.getvalue())
    assert "stopping" in after[0] and any("ending Ray" in line for line in after)
    lag = next(line for line in before if "lag" in line)
    assert any("step 150/600" in line for line in after) and lag in after
