"""Failure report of a run, in one paragraph."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncrl.cli.run.ending import paragraph
from asyncrl.control.record.outcome import Outcome
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.core.states import RunState

BEGAN_S = 1000.0


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    """A run that failed at step 131, with a checkpoint of step 100."""
    folder = RunDir(tmp_path / "x")
    (folder.checkpoints / "step-00000100").mkdir(parents=True)
    (folder.checkpoints / "step-00000050").mkdir()
    folder.logs.mkdir()
    folder.log("learner.0").write_text("\n".join(f"line {n}" for n in range(40)))
    rows = [{"training/global_step": step, "timing_s/step": 1.0} for step in (130, 131)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = {"issued": 2200, "trained": 2096, "dropped": {"stale": 3, "poison": 1}}
    write_json(folder.summary, {"ledger": ledger, "ledger_residue": 0})
    write_json(folder.live, {"run_id": "a", "command": "asyncrl up a.yaml", "began": BEGAN_S})
    write_json(folder.outcome, {"state": "failed", "error": "no memory.", "service": "learner.0", "tail": []})
    return folder


def test_it_says_what_failed_where_what_was_saved_and_how_to_go_on(folder: RunDir) -> None:
    first, *log = paragraph(folder).splitlines()
    assert first == (
        "the run failed in learner.0: no memory. "
        f"Saved: the checkpoint of step 100 in {folder.checkpoints / 'step-00000100'}; "
        "step 131 was the last on record; steps 101 to 131 are trained again from the journal. "
        "Account of the prompts: 2200 issued, 2096 trained, 4 dropped, residue 0. "
        "To go on: asyncrl up a.yaml"
    )
    assert log[0] == f"The last lines of {folder.log('learner.0')}:"
    assert log[1:] == [f"  | line {n}" for n in range(20, 40)]


def test_a_run_without_a_journal_is_not_said_to_go_on(folder: RunDir) -> None:
    values = "model: {path: m}\ndata: {train: t}\nreward: {fn: f}\n"
    folder.resolved.write_text(values + "buffer: {journal: none}\n")
    text = paragraph(folder)
    assert "cannot go on from it, but 'asyncrl export' takes it" in text
    assert "To begin anew: asyncrl up a.yaml" in text and "trained again" not in text
    folder.resolved.write_text(values)
    assert "To go on: asyncrl up a.yaml" in paragraph(folder)


def test_an_account_of_an_earlier_life_is_not_given_for_this_ones(folder: RunDir) -> None:
    os.utime(folder.summary, (BEGAN_S - 1, BEGAN_S - 1))
    assert f"asyncrl inspect account {folder.path}" in paragraph(folder)


def test_a_run_that_saved_nothing_says_so(tmp_path: Path) -> None:
    text = paragraph(RunDir(tmp_path), Outcome(state=RunState.FAILED, error="it died", service="head.0"))
    assert "Saved: no checkpoint; no step was trained." in text
    assert f"To go on: asyncrl up {tmp_path / 'resolved.yaml'} --set run.dir={tmp_path.parent}" in text


REASON = "8 of the last 8 answers could not be scored: the reward 'mine' raised KeyError: 'x' (row 7)"


def test_a_reason_is_told_once_and_not_with_its_traceback(folder: RunDir) -> None:
    error = f"rollout.0 failed: ServiceFailed: rollout.0 cannot go on: {REASON}. Mend the reward"
    tail = ("Traceback (most recent call last):", f"RewardsFailed: {REASON}", f"asyncrl.core.errors.{error}")
    outcome = Outcome(state=RunState.FAILED, error=error, service="rollout.0", tail=tail)
    text = paragraph(folder, replace(outcome, would_repeat=True))
    assert text.startswith(f"the run failed in rollout.0: {REASON}. Mend the reward. Saved: ")
    assert text.count("could not be scored") == 1 and "Traceback" not in text
    assert "It would fail in the same way again: mend that first; then asyncrl up a.yaml" in text
    assert "To go on" not in text
    other = paragraph(folder, replace(outcome, tail=("CUDA error: device lost",)))
    assert "  | CUDA error: device lost" in other and "To go on: asyncrl up a.yaml" in other
