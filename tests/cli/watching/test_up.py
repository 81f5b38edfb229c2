"""`up` of a run that is live, or was: it attaches, refuses, or goes back. The live head is a stand-in."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.cli import exits
from asyncrl.cli.run import start as run
from asyncrl.cli.up import command_of, up
from asyncrl.control.api.server import ControlApi
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.core.config.load import dump_resolved, load_config
from asyncrl.core.errors import ConfigError
from asyncrl.core.runtime.faults import VARIABLE
from tests.planner.plan.model_folder import write_model_folder

RUN_ID = f"upon{os.getpid()}"
CONFIG = """\
run: {name: again}
model: {path: model}
data: {train: train.jsonl}
reward: {fn: gsm8k}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """The folder of a run that `a.yaml` names, and that has begun."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(CONFIG)
    write_model_folder(Path("model"))
    Path("train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    folder = RunDir(tmp_path / "runs" / "again")
    folder.path.mkdir(parents=True)
    config = run.with_absolute_dir(load_config("a.yaml"))
    folder.config.write_text(dump_resolved(config))
    folder.resolved.write_text(dump_resolved(config))
    return folder


@pytest.fixture
def head(folder: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """A live head whose supervisor shows a few snapshots, and then it ends, finished."""
    environment = {**os.environ, RUN_VARIABLE: RUN_ID}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    seen: list[int] = []

    def status(_: dict[str, object]) -> dict[str, object]:
        seen.append(1)
        if len(seen) == 4:
            write_json(folder.outcome, {"state": "finished"})
            process.kill()
        return {"run": "again", "state": "running", "step": len(seen), "steps": 2, "services": {}}

    api = ControlApi(0, "k", {"GET /status": status})
    live = {
        "run_id": RUN_ID,
        "key": "k",
        "sockets": str(folder.path / "s"),
        "pid": process.pid,
        "url": api.url,
    }
    write_json(folder.live, live)
    yield process
    process.kill()
    process.wait(60.0)
    api.close()


def test_up_of_a_live_run_with_the_same_configuration_watches_it(
    folder: RunDir, head: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert up(["a.yaml"], []) == exits.OK
    assert "is live" in capsys.readouterr().err
    assert not folder.logs.exists(), "nothing was started"


def test_up_of_a_live_run_in_the_background_says_how_to_watch_it(
    folder: RunDir, head: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert up(["a.yaml"], [], is_detached=True) == exits.OK
    assert "asyncrl status -w again" in capsys.readouterr().err
    assert head.poll() is None


def test_up_of_a_live_run_with_another_configuration_names_each_difference_with_its_place(
    folder: RunDir, head: subprocess.Popen[bytes]
) -> None:
    Path("b.yaml").write_text("staleness:\n  max_lag: 3\n")
    with pytest.raises(ConfigError) as caught:
        up(["a.yaml", "b.yaml"], ["learner.steps=9"])
    steps, max_lag = sorted(str(caught.value).splitlines()[1:3])
    assert steps.startswith("--set learner.steps=9: learner.steps: ") and steps.endswith(" there, 9 here")
    assert max_lag == "b.yaml:2:12: staleness.max_lag: 4 there, 3 here"
    assert exits.code_of(caught.value) == exits.USAGE
    assert head.poll() is None


@pytest.mark.parametrize("resume", ["never", "100"])
def test_a_live_run_is_not_taken_back(folder: RunDir, head: subprocess.Popen[bytes], resume: str) -> None:
    with pytest.raises(ConfigError, match=f"--resume {resume}: .* is live"):
        up(["a.yaml"], [], resume=resume)
    assert head.poll() is None


def test_a_run_that_is_still_ending_is_waited_for_and_then_begun(
    folder: RunDir, head: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    live = {"run_id": RUN_ID, "key": "k", "sockets": str(folder.path / "s"), "pid": head.pid, "url": ""}
    write_json(folder.live, live)
    write_json(folder.phase, {"state": "stopping", "phase": "ending Ray", "time": 0.0})
    threading.Timer(0.5, head.kill).start()
    with pytest.raises(ConfigError, match=r"--resume never: .*earlier start"):
        up(["a.yaml"], [], resume="never")
    assert head.wait(60.0) != 0
    assert "again: stopping (ending Ray)" in capsys.readouterr().err


def test_a_fresh_start_is_refused_where_an_earlier_life_is(folder: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"--resume never: .*earlier start"):
        up(["a.yaml"], [], resume="never")


def test_a_step_that_the_journal_does_not_know_is_refused_and_nothing_is_written(folder: RunDir) -> None:
    before = sorted(folder.path.iterdir())
    with pytest.raises(ConfigError, match="--resume 7: there is no journal"):
        up(["a.yaml"], [], resume="7")
    assert [path for path in sorted(folder.path.iterdir()) if path.name != "buffer"] == before


@pytest.mark.parametrize("resume", ["newest", "-1", "1.5", ""])
def test_what_is_no_way_to_resume_is_refused(resume: str) -> None:
    with pytest.raises(ConfigError, match="'auto', 'never' or the step"):
        up(["nope.yaml"], [], resume=resume)


BUILTIN = ("model.path=builtin:digit_sort", "data.train=builtin:digit_sort", "data.max_prompt_tokens=16")


@pytest.mark.parametrize(
    ("point", "overrides"),
    [
        ("up.reading", ()),
        ("up.checking", ()),
        ("up.preparing", ()),
        ("up.making", (*BUILTIN, "run.dir=elsewhere", "reward.fn=digit_sort")),
        ("up.fetching", ("model.path=owner/name",)),
    ],
)
def test_ctrl_c_before_the_head_is_told_and_leaves_nothing(
    folder: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    point: str,
    overrides: tuple[str, ...],
) -> None:
    monkeypatch.setenv(VARIABLE, f"interrupt:{point}")
    began = ["rollout={replicas: 1, cpus: 0, max_tokens: 16}", "learner.cpus=0"]
    assert up(["a.yaml"], [*began, *overrides]) == exits.INTERRUPTED
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "interrupted: nothing was started", "and no checkpoint is promised"
    assert VARIABLE not in os.environ, "the point was passed"
    assert not folder.live.exists() and not list(Path("elsewhere").glob("builtin/*"))


def test_two_starts_at_once_make_one_run(folder: RunDir) -> None:
    folder.resolved.unlink()
    with (folder.path / run.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another 'asyncrl up' is starting"):
            run.start(load_config("a.yaml"))
    assert not folder.live.exists()


def test_a_start_beside_another_one_watches_that_ones_run(
    folder: RunDir, head: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    folder.resolved.unlink()
    live = folder.live.rename(folder.path / "not yet")
    with (folder.path / run.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # it has checked everything, and is about to start the head
        threading.Timer(1.0, live.rename, (folder.live,)).start()
        assert up(["a.yaml"], [], is_detached=True) == exits.OK
    assert f"is live (process {head.pid}): nothing is started" in capsys.readouterr().err


def test_a_start_beside_another_one_that_comes_to_nothing_is_refused(
    folder: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.resolved.unlink()
    monkeypatch.setattr("asyncrl.cli.up.OTHER_START_S", 0.2)
    with (folder.path / run.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another 'asyncrl up' is starting"):
            up(["a.yaml"], [])


def test_the_command_of_a_run_is_what_a_shell_reads_back() -> None:
    command = command_of(["my run.yaml", "b.yaml"], ["run.name=x y"])
    assert command == "asyncrl up 'my run.yaml' b.yaml --set 'run.name=x y'"
