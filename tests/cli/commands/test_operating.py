"""The commands that change a live run: from the command line over the real API to what operations do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.control.operations import Operations
from asyncrl.control.record.events import EventLog
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.roster import Roster
from asyncrl.control.snapshot import values_of
from tests.cli.commands.calling import RUN_ID, asyncrl, head_of, live_run, make_config, make_folder
from tests.control.scripted_fleet import ScriptedFleet
from tests.statuses import snapshot_of
from tests.threads import RUNTIME


@pytest.fixture
def fleet() -> ScriptedFleet:
    return ScriptedFleet()


@pytest.fixture
def run(tmp_path: Path, fleet: ScriptedFleet) -> Iterator[RunDir]:
    """A run with the routes that the supervisor's composition makes."""
    config = make_config("one", tmp_path, rollout={"cpus": 0.0})
    operations = Operations(
        Roster(config, tmp_path / "one", RUN_ID, tmp_path, ""),
        fleet,
        fleet.lifecycle,
        EventLog(tmp_path / "events.jsonl", RUNTIME),
        RUNTIME.lock(),
    )
    routes = operations.routes()
    told = values_of(snapshot_of(ledger={"checkpoints": [7]}))
    with live_run(tmp_path, "one", {**routes, "GET /status": lambda _: told}) as folder:
        yield folder


@pytest.mark.parametrize(
    ("words", "told", "said"),
    [
        (["scale", "rollout=0"], [("fleet", "scale 0")], "scaling to 0 rollout replicas"),
        (["drain", "rollout.2"], [("fleet", "drain 2")], "rollout.2 drains; rollout.3 takes its place"),
        (["pause"], [("buffer.0", "pause"), ("learner.0", "pause")], "'asyncrl unpause'"),
        (["unpause"], [("buffer.0", "unpause"), ("learner.0", "unpause")], "the run continues"),
        (["checkpoint", "--wait", "0"], [("learner.0", "checkpoint")], "after the step in progress"),
    ],
)
def test_a_command_reaches_the_run_and_says_so_on_stderr(
    run: RunDir, fleet: ScriptedFleet, words: list[str], told: list[tuple[str, str]], said: str
) -> None:
    done = asyncrl(*words, "--dir", run.path.parent)
    assert (done.code, done.out) == (0, "") and said in done.err
    assert fleet.told == told


def test_a_checkpoint_is_awaited_and_its_step_is_data(run: RunDir, fleet: ScriptedFleet) -> None:
    done = asyncrl("checkpoint", "--run", "one", "--dir", run.path.parent)
    assert done.code == 0 and json.loads(done.out) == {"step": 7}


def test_who_cannot_be_told_of_a_pause_is_named(run: RunDir, fleet: ScriptedFleet) -> None:
    fleet.unreachable = {"buffer.0"}
    assert "buffer.0 cannot be reached" in asyncrl("pause", "--dir", run.path.parent).err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["drain", "rollout.1"], 2, "there are: rollout.0, rollout.2"),
        (["drain", "learner.0"], 2, "not of the form [RUN] rollout.N"),
        (["drain", "rollout.x"], 2, "not of the form [RUN] rollout.N"),
        (["scale", "rollout=-1"], 2, "not of the form [RUN] rollout=N"),
    ],
)
def test_a_refused_command_is_a_message_and_an_exit_code(
    run: RunDir, fleet: ScriptedFleet, words: list[str], code: int, said: str
) -> None:
    done = asyncrl(*words, "--dir", run.path.parent)
    assert (done.code, done.out) == (code, "") and said in done.err
    assert fleet.told == []


@pytest.mark.parametrize(
    ("words", "state", "said"),
    [
        (["scale", "rollout=1"], "starting", "only a running one can be scaled"),
        (["drain", "rollout.0"], "starting", "only a running one's replicas can be drained"),
        (["pause"], "stopping", "it takes no more commands"),
        (["checkpoint"], "finished", "it takes no more commands"),
    ],
)
def test_what_makes_sense_and_the_run_cannot_do_is_a_failed_command(
    run: RunDir, fleet: ScriptedFleet, words: list[str], state: str, said: str
) -> None:
    fleet.lifecycle.state = state
    done = asyncrl(*words, "--dir", run.path.parent)
    assert (done.code, done.out) == (1, "") and said in done.err
    assert fleet.told == []


def test_more_replicas_than_there_is_room_for_is_a_failed_command(
    tmp_path: Path, fleet: ScriptedFleet
) -> None:
    config = make_config("one", tmp_path, rollout={"cpus": 10_000.0})
    roster = Roster(config, tmp_path / "one", RUN_ID, tmp_path, "")
    operations = Operations(
        roster, fleet, fleet.lifecycle, EventLog(tmp_path / "events.jsonl", RUNTIME), RUNTIME.lock()
    )
    with live_run(tmp_path, "one", operations.routes()):
        done = asyncrl("scale", "rollout=2", "--dir", tmp_path)
    assert done.code == 1 and "this machine has" in done.err and fleet.told == []


@pytest.mark.parametrize(("state", "code"), [("stopped", 0), ("failed", 1)])
def test_down_says_whether_the_run_it_ended_had_failed(tmp_path: Path, state: str, code: int) -> None:
    folder = make_folder(tmp_path, "one")
    with head_of(folder):
        error = "learner.0 did not end within 120 s" if state == "failed" else ""
        write_json(folder.outcome, {"state": state, "error": error, "service": "learner.0", "tail": []})
        done = asyncrl("down", "--dir", tmp_path)
    assert done.code == code and "the run has ended" in done.err
    assert ("did not end within 120 s" in done.err) is (state == "failed")


def test_a_run_that_is_starting_can_be_ended_and_asked_for_nothing_else(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "one")
    with head_of(folder) as head:
        refused = asyncrl("pause", "--dir", tmp_path)
        assert refused.code == 4 and "is starting, or ending" in refused.err
        stopped = {"state": "stopped", "error": "", "service": "", "tail": []}
        write_json(folder.outcome, stopped)  # as a head does that is ended in its start
        done = asyncrl("down", "--dir", tmp_path)
        assert (done.code, done.out) == (0, "") and "the run has ended" in done.err
        assert head.wait(60.0) != 0


@pytest.mark.parametrize(
    "name", ["down", "drain rollout.0", "pause", "unpause", "checkpoint", "scale rollout=1"]
)
def test_without_a_live_run_the_exit_code_is_4(tmp_path: Path, name: str) -> None:
    done = asyncrl(*name.split(), "--dir", tmp_path)
    assert done.code == 4 and "there is no run in" in done.err
