"""`asyncrl inspect trace`: a window of a run's steps as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.cli.audit.report import opened_past
from asyncrl.cli.exits import say, show
from asyncrl.cli.timeline.chrome import chrome_trace
from asyncrl.cli.timeline.groups import GroupBook
from asyncrl.cli.timeline.spans import Timeline, Window, events_in, rounds_in
from asyncrl.cli.timeline.steps import choose_steps, findings_in, spans_of_steps, window_of
from asyncrl.cli.timeline.sync_history import read_entries
from asyncrl.control.record.events import load_events
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.rows.row_files import load_rows
from asyncrl.core.errors import ConfigError

TRACE_FILE = "trace.json"
NEWEST_STEPS = 50
Steps = tuple[int | None, int | None]


def print_trace(folder: Path, steps: str | None, target: Path | None, as_json: bool) -> None:
    """Write the trace of the run in `folder` and print where.

    Args:
        steps: `A-B`, `A-`, `-B` or `A`; None for the newest ones.
        target: The file; None writes into the run's folder.
        as_json: Print the trace itself.
    """
    trace = json.dumps(make_trace(folder, steps), separators=(",", ":"))
    if as_json:
        print(trace)
        return
    path = target or folder / TRACE_FILE
    path.write_text(trace + "\n", encoding="utf-8")
    show(path)
    say("open it at https://ui.perfetto.dev, or in chrome://tracing")


def make_trace(folder: Path, steps: str | None) -> dict[str, object]:
    """Return the trace of the run in `folder`, living or ended.

    Raises:
        ConfigError: `steps` cannot be read, or the run has none of them.
        CheckpointError: The journal is damaged.
    """
    run_dir = RunDir(folder)
    first, last = parse_steps(steps)
    rows = choose_steps(load_rows(run_dir.metrics), first, last, NEWEST_STEPS)
    spans = spans_of_steps(rows)
    window = window_of(spans)
    timelines = [
        Timeline(window, spans, findings_in(rows)),
        _groups(folder, window),
        rounds_in(read_entries(folder), window),
        events_in(load_events(run_dir.events), window),
    ]
    numbers = [int(row["training/global_step"]) for row in rows]
    return chrome_trace(timelines, {"run": folder.name, "steps": f"{numbers[0]}-{numbers[-1]}"})


def parse_steps(text: str | None) -> Steps:
    """Return the first and the last step that are asked for; None leaves an end open.

    >>> parse_steps("3-5"), parse_steps("7"), parse_steps("3-"), parse_steps(None)
    ((3, 5), (7, 7), (3, None), (None, None))

    Raises:
        ConfigError: `text` is not a range of steps.
    """
    if text is None:
        return None, None
    first, dash, last = text.partition("-")
    if not dash:
        last = first
    ends = [int(end) if end else None for end in (first, last) if end.isdecimal() or not end]
    is_range = len(ends) == 2 and ends != [None, None]
    if not is_range or (None not in ends and ends[0] > ends[1]):  # type: ignore[operator]
        raise ConfigError(
            f"--steps '{text}' is not a range of steps", hint="For example 100-120, 100- or 100"
        )
    return ends[0], ends[1]


def _groups(folder: Path, window: Window) -> Timeline:
    book = GroupBook(window)
    try:
        with opened_past(folder) as past:
            book.take_all(past.events())
    except ConfigError as error:
        say(f"trace written without group spans: {error}")
        return Timeline(window)
    return book.timeline()
