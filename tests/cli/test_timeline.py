"""The trace of a window of steps: well formed, without overlaps, and its sums are those of the record."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.journals.kind import open_journal
from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.store import ExperienceStore
from asyncrl.cli.app import app
from asyncrl.cli.audit.account import TimedEvent
from asyncrl.cli.audit.report import opened_past
from asyncrl.cli.reports.trace import make_trace, parse_steps
from asyncrl.cli.timeline.chrome import chrome_trace
from asyncrl.cli.timeline.groups import GROUPS, HELD, GroupBook
from asyncrl.cli.timeline.spans import Span, Timeline, Window, join, lay_out, rounds_in
from asyncrl.cli.timeline.steps import choose_steps, findings_in, spans_of_steps
from asyncrl.control.record.events import EventLog
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import encode_group
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.parts import GROUP_SIZE, make_group
from weight_sync.sync_records import RoundRecord

MICROS = 1e6
PHASES = {"X": {"ts", "dur", "tid"}, "i": {"ts", "tid", "s"}, "C": {"ts", "args"}, "M": {"args"}}
"""What the Trace Event Format asks of each kind of event, beside its name and process."""


def check_trace(trace: dict[str, Any]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Check a trace against the format; return its spans by service and lane."""
    trace = json.loads(json.dumps(trace))
    names: dict[tuple[int, int, str], str] = {}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["name"]
        assert event["pid"] > 0
        assert PHASES[event["ph"]] <= set(event), event
        assert all(
            type(event[key]) is int and event[key] >= 0 for key in ("ts", "dur", "tid") if key in event
        )
        if event["ph"] == "M":
            names[event["pid"], event["tid"], event["name"]] = str(next(iter(event["args"].values())))
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(dict)
    for (pid, tid), spans in tracks.items():
        for before, after in pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"], (before, after)
        found[names[pid, 0, "process_name"]][names[pid, tid, "thread_name"]] = spans
    assert len({pid for pid, _, kind in names if kind == "process_name"}) == len(
        {event["pid"] for event in trace["traceEvents"]}
    )
    return found


def make_row(step: int, time_s: float, **stages: float) -> dict[str, Any]:
    times = {f"timing_s/{name}": seconds for name, seconds in stages.items()}
    return {"time": time_s, "training/global_step": step, **times, "timing_s/step": sum(stages.values())}


ROWS = [
    make_row(1, 110.0, fetch=1.0, update_actor=6.0, wait=2.5, other=0.5),
    make_row(2, 118.0, update_weights=1, fetch=0.5, update_actor=4, wait=2, wait_buffer=0.25, other=0.25),
    make_row(3, 125.5, save_checkpoint=1.5, update_weights=1, fetch=0.5, update_actor=4, wait=0, other=0.5),
]  # fmt: skip


def test_stages_fill_each_step_in_their_order_and_steps_fill_the_window():
    spans = spans_of_steps(ROWS)
    tracks = check_trace(chrome_trace([Timeline(Window(100.0, 125.5), spans)], {}))["learner.0"]
    assert [(span["ts"], span["dur"]) for span in tracks["steps"]] == [
        (0, 10_000_000), (10_000_000, 8_000_000), (18_000_000, 7_500_000)
    ]  # fmt: skip
    assert [span["name"] for span in tracks["stages"]] == [
        "wait", "fetch", "update_actor", "other",
        "wait_buffer", "update_weights", "wait", "fetch", "update_actor", "other",
        "save_checkpoint", "update_weights", "fetch", "update_actor", "other",
    ]  # fmt: skip
    for step in (1, 2, 3):
        stages = [span for span in tracks["stages"] if span["args"]["step"] == step]
        whole = tracks["steps"][step - 1]
        assert sum(span["dur"] for span in stages) == whole["dur"]
        assert stages[0]["ts"] == whole["ts"]


def test_rows_whose_times_are_too_close_do_not_overlap_and_keep_their_lengths():
    late = [row | {"time": 125.5} for row in ROWS]  # recorded together, at the end
    spans = spans_of_steps(late)
    tracks = check_trace(chrome_trace([Timeline(Window(100.0, 125.5), spans)], {}))["learner.0"]
    assert [span["dur"] for span in tracks["steps"]] == [10_000_000, 8_000_000, 7_500_000]


def test_steps_are_chosen_by_number_or_the_newest():
    evaluation = {"time": 111.0, "training/global_step": 1, "val-core/held_out/acc/mean@1": 0.5}
    rows = [ROWS[0], evaluation, *ROWS[1:]]
    assert choose_steps(rows, None, None, 2) == ROWS[1:]
    assert choose_steps(rows, 2, None, 1) == ROWS[1:]
    assert choose_steps(rows, None, 2, 1) == ROWS[:2]
    with pytest.raises(ConfigError, match="it has steps 1 to 3"):
        choose_steps(rows, 7, 9, 1)
    with pytest.raises(ConfigError, match="it has taken no step"):
        choose_steps([], None, None, 1)


@pytest.mark.parametrize("text", ["", "-", "x", "3-x", "5-3", "1-2-3", "-1-2"])
def test_a_range_of_steps_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="not a range of steps"):
        parse_steps(text)


def test_however_spans_fall_no_two_of_a_row_overlap_and_none_is_lost():
    dice = random.Random(0)
    for _ in range(200):
        starts = [dice.randrange(20) for _ in range(dice.randrange(1, 30))]
        spans = [Span("a", "b", str(n), t, t + dice.randrange(1, 8)) for n, t in enumerate(starts)]
        (rows,) = lay_out(spans).values()
        assert sorted(span.name for row in rows for span in row) == sorted(span.name for span in spans)
        for row in rows:
            assert all(a.end_s <= b.start_s for a, b in pairwise(row))
        ticks = {t + 0.5 for span in spans for t in range(int(span.start_s), int(span.end_s))}
        assert len(rows) == max(sum(s.start_s < tick < s.end_s for s in spans) for tick in ticks), "as few"
        assert sum(span.end_s - span.start_s for span in join(spans, "c", "d")) == len(ticks)


def past(*events: tuple[float | None, ev.Event]) -> Iterator[TimedEvent]:
    return (TimedEvent(time_s, event) for time_s, event in events)


def test_a_group_lasts_from_its_lease_to_whatever_ended_it():
    book = GroupBook(Window(100.0, 200.0))
    leased = [(100.0 + n, ev.Leased(n, f"rollout.{n % 2}", 0.0, n, 4)) for n in range(6)]
    ends: list[tuple[float | None, ev.Event]] = [
        (110.0, ev.Stored(0, 64, 1000, (4, 4))),
        (111.0, ev.Reissued(1, "expired")),
        (112.0, ev.PartialStored(2, 10, 100, (4, 4))),
        (113.0, ev.Dropped(3, "poison", True)),
        (114.0, ev.Leased(4, "rollout.1", 0.0, 4, 5)),
        (115.0, ev.Reserved(0, (0,))),
        (None, ev.Stored(5, 64, 1000, (4, 4))),
    ]
    book.take_all(past(*leased, *ends))
    timeline = book.timeline()
    groups = [span for span in timeline.spans if span.lane == GROUPS]
    found = {(s.service, s.name, s.start_s): (s.end_s, s.details["ended"]) for s in groups}
    assert found == {
        ("rollout.0", "ticket 0", 100.0): (110.0, "stored"),
        ("rollout.1", "ticket 1", 101.0): (111.0, "expired"),
        ("rollout.0", "ticket 2", 102.0): (112.0, "partial"),
        ("rollout.1", "ticket 3", 103.0): (113.0, "dropped: poison"),
        ("rollout.0", "ticket 4", 104.0): (114.0, "leased again"),
        ("rollout.1", "ticket 4", 114.0): (200.0, "still open"),
        ("rollout.1", "ticket 5", 105.0): (200.0, "still open"),
    }
    held = {span.service: (span.start_s, span.end_s) for span in timeline.spans if span.lane == HELD}
    assert held == {"rollout.0": (100.0, 114.0), "rollout.1": (101.0, 200.0)}
    assert [(count.time_s, count.value) for count in timeline.counts] == [(110.0, 1), (115.0, 0)]
    check_trace(chrome_trace([timeline], {}))


def test_what_reaches_over_the_edge_of_the_window_is_cut_there():
    book = GroupBook(Window(100.0, 200.0))
    book.take_all(past((50.0, ev.Leased(1, "rollout.0", 0.0, 1, 1)), (150.0, ev.Stored(1, 1, 1, (1, 1)))))
    book.take_all(past((10.0, ev.Leased(2, "rollout.0", 0.0, 1, 1)), (90.0, ev.Stored(2, 1, 1, (1, 1)))))
    record = RoundRecord(1, "MAIN", 2, 1, 1, {}, 5.0, 8, "", {}, (), time=101.0)
    rounds = rounds_in([record], Window(100.0, 200.0))
    tracks = check_trace(chrome_trace([book.timeline(), rounds], {}))
    assert [(span["ts"], span["dur"]) for span in tracks["rollout.0"]["groups"]] == [(0, 50_000_000)]
    assert [(span["ts"], span["dur"]) for span in tracks["weight_sync.0"]["rounds (MAIN)"]] == [
        (0, 1_000_000)
    ]


def test_a_rise_of_the_guards_counters_is_a_moment():
    rows = [row | {"guard/kl_spike": float(n > 0), "guard/lr_scale": 1.0 + n} for n, row in enumerate(ROWS)]
    assert [(moment.name, moment.time_s) for moment in findings_in(rows)] == [("guard: kl_spike", 118.0)]


# A run's folder, as it is on disk


def make_run(folder: Path, journal: str = "file") -> None:
    """Two steps on a real store's journal, and the files that the other services write."""
    config = Config.model_validate(
        {
            "run": {"name": folder.name, "dir": str(folder.parent)},
            "model": {"path": "builtin:digit_sort"},
            "data": {"train": "builtin:digit_sort"},
            "reward": {"fn": "gsm8k"},
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": 32},
            "learner": {"groups_per_step": 2},
            "staleness": {"max_lag": 1},
            "buffer": {"journal": journal},
        }
    )
    folder.mkdir()
    (folder / "resolved.yaml").write_text(dump_resolved(config))
    with closing(open_journal(config.buffer, folder)) as kept:
        store = ExperienceStore(ledger_settings(config), kept, GROUP_SIZE, True, now=0.0)
        store.ledger.describe_data(100, "digest")
        token = store.ledger.open("learner")
        version = store.ledger.register_version(token, 0)
        for step in range(2):
            grants = store.ledger.lease("rollout.0", version, 2, 0.0)
            assert store.commit(0.0)
            for grant in grants:
                group = make_group(grant.ticket, grant.attempt, version, (0.0, 1.0))
                store.push("rollout.0", grant.ticket, grant.attempt, encode_group(group))
                assert store.commit(0.0)
            assert store.ledger.reserve(token, step, 0.0) is not None
            store.ledger.trained(token, step, lag_max=0)
            version = store.ledger.register_version(token, step + 1)
            assert store.commit(0.0)
    if journal == "none":
        last_s = 1e9
    else:
        with opened_past(folder) as read:
            last_s = max(timed.time_s or 0.0 for timed in read.events())
    rows = [make_row(step, last_s + step, fetch=500.0, wait=0.5) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        {"time": last_s, "kind": "start", "token": 3},
        {"time": last_s, "kind": "round", "round": 1, "lane": "MAIN", "number": 1, "step": 0, "membership": 1,
         "num_bytes": 8, "seconds": 0.25, "parts": {"receiver.0": "SWAPPED"}, "cause": "", "causes": {},
         "culprits": []},
        {"time": last_s, "kind": "blame", "culprit": "receiver.1", "cause": "silent", "number": 1},
    ]  # fmt: skip
    (folder / "weight_sync.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def events_of(trace: dict[str, Any], phase: str) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == phase]


def test_the_trace_of_a_run_holds_its_learner_replicas_rounds_and_events(tmp_path: Path):
    folder = tmp_path / "told"
    make_run(folder)
    trace = make_trace(folder, None)
    tracks = check_trace(trace)
    assert set(tracks) == {"learner.0", "rollout.0", "weight_sync.0"}
    leases: dict[int, float] = {}
    expected = {}
    with opened_past(folder) as read:
        for timed in read.events():
            if isinstance(timed.event, ev.Leased):
                leases[timed.event.ticket] = timed.time_s or 0.0
            if isinstance(timed.event, ev.Stored):
                expected[f"ticket {timed.event.ticket}"] = (timed.time_s or 0.0) - leases[timed.event.ticket]
    lanes = [spans for lane, spans in tracks["rollout.0"].items() if GROUPS in lane]
    groups = {span["name"]: span["dur"] for spans in lanes for span in spans}
    assert len(groups) == 4
    assert groups == {name: pytest.approx(seconds * MICROS, abs=2.0) for name, seconds in expected.items()}
    moments = events_of(trace, "i")
    assert {"version 1", "trained step 0", "trained step 1", "start", "blames receiver.1: silent"} <= set(
        moments
    )
    assert events_of(trace, "C") == ["stored groups"] * 6
    assert trace["otherData"]["steps"] == "1-2"


def test_restarts_and_the_other_events_of_a_run_are_in_its_trace(tmp_path: Path, monkeypatch):
    make_run(tmp_path / "told")
    run_dir = RunDir(tmp_path / "told")
    inside = make_trace(run_dir.path, None)["otherData"]["start_unix_s"] + 1.0
    at_that_time = ThreadRuntime()
    monkeypatch.setattr(at_that_time, "wall_ns", lambda: int(inside * 1e9))
    log = EventLog(run_dir.events, at_that_time)
    log.add("restart", "rollout.1", "it was killed", attempt=2)
    log.add("guard", "learner.0", "kl_spike")
    trace = make_trace(run_dir.path, None)
    check_trace(trace)
    assert {"restart: it was killed", "guard: kl_spike"} <= set(events_of(trace, "i"))
    (restart,) = [event for event in trace["traceEvents"] if event["name"].startswith("restart")]
    assert (restart["ts"], restart["args"]) == (1_000_000, {"attempt": 2})


def ask(runs_dir: Path, *words: str):
    return CliRunner().invoke(app, ["inspect", "trace", *words, "--dir", str(runs_dir)])


def test_the_command_writes_the_trace_where_it_is_told_and_says_where(tmp_path: Path):
    make_run(tmp_path / "told")
    answer = ask(tmp_path, "told")
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.strip() == str(tmp_path / "told" / "trace.json")
    check_trace(json.loads((tmp_path / "told" / "trace.json").read_text()))
    assert ask(tmp_path, "--run", "told", "--to", str(tmp_path / "t.json")).stdout.strip() == str(
        tmp_path / "t.json"
    )
    printed = json.loads(ask(tmp_path, "told", "--steps", "2", "--json").stdout)
    assert printed["otherData"]["steps"] == "2-2"
    assert isinstance(ask(tmp_path, "told", "--steps", "2-x").exception, ConfigError)


def test_a_run_without_a_journal_has_a_trace_of_its_learner(tmp_path: Path):
    make_run(tmp_path / "told", journal="none")
    answer = ask(tmp_path, "told", "--json")
    assert "without group spans" in answer.stderr
    assert "learner.0" in check_trace(json.loads(answer.stdout))
