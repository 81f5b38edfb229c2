"""Runs that are held up say so at once, in the words of who met it, and end where nobody can go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.cli.reports.weights import inspect_weights
from asyncrl.control.page.view import view_of
from asyncrl.control.record.events import load_events
from asyncrl.control.record.rundir import RunDir
from asyncrl.faults import VARIABLE
from tests.system.up_run import UpRun

QUICK = ("rollout.replicas=1", "rollout.engine=scripted", "eval.every_steps=0", "learner.steps=1000")
SOON_S = 10.0


def held_up_by(run: UpRun, cause: str, deadline_s: float = 400.0) -> dict[str, Any]:
    """Wait for an obstacle; check that snapshot, page and events have it, and return it."""

    def finds(status: dict[str, Any]) -> bool:
        return any(one["cause"] == cause for one in status["obstacles"])

    status = run.wait_for(finds, deadline_s)
    found: dict[str, Any] = next(one for one in status["obstacles"] if one["cause"] == cause)
    page = view_of(status)
    assert found["reason"].rstrip(".") in [one["text"].rstrip(".") for one in page["obstacles"]]
    (event, *_) = [one for one in obstacles_of(run) if one["cause"] == cause]
    assert event["service"] == found["service"] and event["time"] - found["since"] < 1.0
    return found


def obstacles_of(run: UpRun) -> list[dict[str, Any]]:
    return [one for one in load_events(RunDir(run.folder).events) if one["kind"] == "obstacle"]


def check_ended(run: UpRun, sentence: str) -> str:
    """The run ends by itself, with exit code 1 and the sentence, which stood on the terminal before."""
    code, output = run.finish()
    assert code == 1, output
    told, _, paragraph = output.partition("the run failed in ")
    assert any(line.startswith("! ") and sentence in line for line in told.splitlines()), output
    assert sentence in paragraph.split("The last lines of")[0], output
    return output


@pytest.mark.long
def test_a_run_whose_engines_refuse_every_version_ends_with_the_engines_reason(
    up: Callable[..., UpRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "engine.load")  # each load, at its first tensor, in vLLM's own worker
    sentence = "was told to fail at tensor 0"
    run = up("refused", "rollout.replicas=1", "eval.every_steps=0", "learner.steps=1000")
    found = held_up_by(run, "weights_refused")
    assert found["blocks"] and sentence in found["reason"]
    first = next(one for one in obstacles_of(run))
    log = (run.folder / "logs" / "rollout.0.log").read_text()
    met = next(line for line in log.splitlines() if sentence in line and " WARNING " in line)
    met_at = time.mktime(time.strptime(met[:19], "%Y-%m-%d %H:%M:%S"))
    assert first["time"] - met_at < SOON_S
    output = check_ended(run, sentence)
    assert "can take no version, nor can another replica" in output
    weights = inspect_weights(run.folder)
    assert weights["counters"]["rounds_failed"] >= 1 and weights["counters"]["failed_loads"] >= 6
    assert weights["rounds"][0]["parts"] == {"receiver.0": "REFUSED"}
