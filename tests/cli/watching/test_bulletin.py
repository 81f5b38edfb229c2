"""Obstacles and events on the terminal: each is told once, as it happens."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from asyncrl.cli.bulletin import Bulletin
from asyncrl.cli.live import panel_of
from asyncrl.cli.views import LineView
from tests.statuses import snapshot_of

AWAY = {"service": "buffer.0", "reason": "Redis is away: Connection refused", "count": 1, "blocks": True}


def event(time: float, kind: str, service: str, text: str) -> dict[str, Any]:
    return {"time": time, "kind": kind, "service": service, "text": text}


def test_a_line_view_prints_what_holds_and_then_what_happens_each_once() -> None:
    stream = io.StringIO()
    view = LineView(stream)
    old = event(5.0, "obstacle", "rollout.0", "long over")
    snapshot = {"run": "x", "state": "running", "obstacles": [AWAY], "events": [old]}
    view.show(snapshot_of(snapshot))
    view.show(snapshot_of(snapshot))
    died = event(6.0, "exit", "rollout.1", "rollout.1 gone: signal 9")
    scaled = event(7.0, "scale", "rollout", "3 replicas are wanted")
    view.show(snapshot_of(snapshot | {"events": [old, died, scaled]}))
    view.show(snapshot_of(snapshot | {"events": [old, died, scaled]}))
    assert stream.getvalue().splitlines() == [
        "! buffer.0: Redis is away: Connection refused",
        "x: running",
        "! rollout.1 gone: signal 9",
    ]


def test_a_snapshot_without_events_tells_nothing_and_spoils_nothing() -> None:
    bulletin = Bulletin()
    assert bulletin.lines(snapshot_of({"state": "silent"})) == []
    assert bulletin.lines(snapshot_of({"obstacles": [AWAY | {"count": 4}], "events": []})) == [
        "! buffer.0: Redis is away: Connection refused (4 times in a row)"
    ]


def test_what_happens_after_the_clock_was_set_back_is_told_once_too() -> None:
    bulletin = Bulletin()
    events = [event(7200.0, "exit", "rollout.0", "signal 9")]
    assert bulletin.lines(snapshot_of({"events": events})) == []
    events.append(event(3600.0, "exit", "rollout.1", "signal 9"))
    assert bulletin.lines(snapshot_of({"events": events})) == ["! rollout.1: signal 9"]
    assert bulletin.lines(snapshot_of({"events": events})) == []
    assert bulletin.lines(snapshot_of({"events": events[-1:]})) == [], "the oldest are let go"


def test_the_panel_shows_the_newest_three_of_the_events_that_lines_tell() -> None:
    events = [
        event(1.0, "stall", "learner.0", "no step for 60 s"),
        event(2.0, "exit", "rollout.1", "rollout.1 gone: signal 9"),
        event(3.0, "guard", "learner.0", "the guard found, step 4: large_steps: " + "long " * 100),
        event(4.0, "scale", "rollout", "3 replicas are wanted"),
        event(5.0, "obstacle", "buffer.0", "over after 2 s: [away]"),
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(panel_of(snapshot_of(run="x", state="running", events=events)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    told = [line.strip("\u2502 ") for line in lines if "! " in line]
    assert [line.partition("! ")[2][:30] for line in told] == [
        "buffer.0: over after 2 s: [away]"[:30],
        "learner.0: the guard found, step 4: "[:30],
        "rollout.1 gone: signal 9",
    ]
    assert "stall" not in "".join(lines) and "wanted" not in "".join(lines)
    assert sum("long" in line for line in lines) == 1, "a long one is cut"


def test_the_panel_shows_obstacles_above_all_else() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(panel_of(snapshot_of(run="x", state="running", obstacles=[AWAY])))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "buffer.0: Redis is away: Connection refused" in lines[1]
