"""Rows of the learner that nobody was handed: they are in its own log. Services are scripted, in threads."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from scripted_services import ROW

from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.control.rows.recorder import lost_rows, training_rows
from asyncrl.control.rows.row_files import load_rows
from asyncrl.core.metrics.row_log import RowLog, read_rows
from asyncrl.core.metrics.run_names import FIRST_AFTER_START
from tests.control.supervisor.test_repair import make_supervised
from tests.statuses import told_by
from tests.waiting import wait_for

STEP = "training/global_step"


@pytest.mark.parametrize("mute", ["0", "01"])
def test_rows_that_a_learner_handed_over_to_nobody_are_taken_from_its_own_log(
    tmp_path: Path, mute: str
) -> None:
    """The first one dies after step 5 with a checkpoint of step 2: steps 1 and 2 are not taken again."""
    (tmp_path / "mute").write_text(mute)
    supervisor, launcher = make_supervised(tmp_path, "MuteLearner")
    thread = threading.Thread(target=supervisor.run, args=(threading.Event(),))
    thread.start()
    wait_for(lambda: "learner.0" in launcher.adopt())
    wait_for(lambda: launcher.service("learner.0").status().step == 5)
    launcher.gone.add("learner.0")
    wait_for(lambda: launcher.started.count("learner.0") == 2)
    wait_for(lambda: STEP in told_by(supervisor)["metrics"])
    if mute == "0":
        wait_for(lambda: [told_by(supervisor)["metrics"].get(key) for key in (STEP, "incarnation")] == [5, 1])
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        steps = [row["training/global_step"] for row in training_rows(lines)]
        assert steps[:2] == [1, 2], "they are taken down when the second one is seen, before what it does"
    (tmp_path / "go-on").touch()
    thread.join(120.0)
    assert not thread.is_alive()
    rows = training_rows(load_rows(tmp_path / "metrics.jsonl"))
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["incarnation"] for row in rows] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [row[FIRST_AFTER_START] for row in rows] == [1, 0, 1, 0, 0, 0, 0, 0]
    assert not any(path.exists() for path in RunDir(tmp_path).learner_rows), "all of it is on record"
    assert (read_json(RunDir(tmp_path).summary) or {})["steps"] == 8
    assert (read_json(RunDir(tmp_path).outcome) or {})["state"] == "finished"


def test_rows_that_a_dead_supervisor_never_took_down_are_on_record_when_the_next_one_begins(
    tmp_path: Path,
) -> None:
    log = RowLog(tmp_path)
    for step in (1, 2, 3, 2):  # a rollback: step 2 was taken again
        log.add({"time": time.time(), "training/global_step": step, **ROW})
    with RunDir(tmp_path).learner_rows[-1].open("a") as file:
        file.write('{"training/global_step": 4, "ti')
    newest = read_rows(tmp_path)[-1]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(read_rows(tmp_path)[0]) + "\n")
    supervisor, launcher = make_supervised(tmp_path, "WaitingLearner")
    supervisor._begin()
    launcher.stop(launcher.started, 5.0)
    supervisor._rows._recorder.close()
    rows = load_rows(tmp_path / "metrics.jsonl")
    assert [row["training/global_step"] for row in rows] == [1, 2, 3] and rows[1] == newest
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_lost_rows_are_found_whatever_the_clock_of_a_life_says() -> None:
    def row(step: int, time_s: float) -> dict[str, float]:
        return {STEP: step, "time": time_s}

    first, second = [row(1, 1000.0), row(2, 1001.0), row(3, 1002.0)], [row(2, 400.0), row(3, 401.0)]
    recorded = [*first, {**row(2, 5000.0), "val-core/acc": 1.0}]
    assert lost_rows(recorded, [*first, *second]) == second, "an hour was set back before the second one"
    assert lost_rows([*recorded, *second], [*first, *second]) == []
    assert lost_rows([first[0], *second], [*first, *second]) == [], "steps that were taken again"
    rolled_back = [row(1, 1.0), row(2, 2.0), row(3, 3.0), row(2, 4.0)]
    assert lost_rows([], rolled_back) == [row(1, 1.0), row(3, 3.0), row(2, 4.0)], "in the order of the log"
