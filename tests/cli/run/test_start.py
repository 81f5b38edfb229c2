"""Refusals and clean-up before a run starts. Nothing is started in these tests."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.run import resume
from asyncrl.cli.run import start as run
from asyncrl.cli.run.client import NotRunning, find_live_folder
from asyncrl.cli.run.difference import compare_with_run
from asyncrl.cli.run.handle import attach
from asyncrl.control.machine.processes import end_leftovers, is_alive, remove_leftovers
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.core.config.load import dump_resolved, load_config, load_resolved
from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from tests.planner.plan.model_folder import write_model_folder

RUN_ID = f"past{os.getpid()}"


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    model = write_model_folder(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    return {
        "run": {"name": "again", "dir": str(tmp_path)},
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"fn": "gsm8k"},
    }


@pytest.fixture
def marked_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries the run's mark, as everything that a run starts does."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, RUN_VARIABLE: RUN_ID}
    )
    yield process
    process.kill()
    process.wait(60.0)


def write_live(folder: Path, pid: int) -> None:
    folder.mkdir(exist_ok=True)
    write_json(folder / "run.json", {"run_id": RUN_ID, "key": "k", "sockets": str(folder / "s"), "pid": pid})


def test_a_run_that_is_live_is_not_started_twice(
    values: dict[str, Any], tmp_path: Path, marked_process: subprocess.Popen[bytes]
) -> None:
    write_live(tmp_path / "again", marked_process.pid)
    with pytest.raises(ConfigError, match="is live"):
        run.start(Config(**values))
    assert marked_process.poll() is None


def test_a_pid_that_another_program_has_by_now_does_not_make_a_run_live(tmp_path: Path) -> None:
    assert not is_alive(os.getpid(), RUN_ID)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("run", "seed", 7),
        ("learner", "groups_per_step", 32),
        ("rollout", "group_size", 4),
        ("data", "order", "sequential"),
    ],
)
def test_a_run_does_not_go_on_with_values_that_its_journal_depends_on(
    values: dict[str, Any], tmp_path: Path, section: str, name: str, value: int | str
) -> None:
    folder = tmp_path / "again"
    folder.mkdir()
    (folder / "resolved.yaml").write_text(dump_resolved(Config(**values)))
    changed = {**values, section: {**values.get(section, {}), name: value}}
    with pytest.raises(ConfigError, match=rf"{section}\.{name}: was .*, is {value!r}"):
        run.start(Config(**changed))


def test_what_a_dead_run_left_is_ended_by_its_mark_and_removed(
    tmp_path: Path, marked_process: subprocess.Popen[bytes]
) -> None:
    segments = Path("/dev/shm") / f"asyncrl-{RUN_ID}-left"
    segments.mkdir()
    (segments / "publisher-1").write_bytes(b"x")
    semaphore = Path("/dev/shm") / f"sem.asyncrl-{RUN_ID}-left"
    semaphore.touch()
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    assert end_leftovers(RUN_ID) == 1
    assert marked_process.wait(60.0) != 0
    assert remove_leftovers(RUN_ID, sockets) == ["publisher-1", semaphore.name]
    assert not segments.exists() and not semaphore.exists() and not sockets.exists()


def test_a_run_that_has_done_its_steps_is_known_and_one_with_more_to_do_is_not(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = Config(**{**values, "learner": {"steps": 20}})
    folder = RunDir(tmp_path / "again")
    folder.path.mkdir()
    assert run.finished_run(config) is None
    write_json(folder.outcome, {"state": "finished"})
    write_json(folder.summary, {"steps": 20})
    assert run.finished_run(config) == folder
    assert run.finished_run(Config(**{**values, "learner": {"steps": 21}})) is None
    write_json(folder.outcome, {"state": "stopped"})
    assert run.finished_run(config) is None


@pytest.mark.parametrize("name", ["model", "critic"])
def test_a_run_goes_on_with_the_revision_that_it_fetched_at_first(
    values: dict[str, Any], tmp_path: Path, name: str
) -> None:
    values["algorithm"] = {"advantage": "gae"}
    config = Config(**{**values, name: {"path": "owner/name"}})
    section = getattr(config, name)

    def kept(path: str = "owner/name") -> str:
        changed = config.model_copy(update={name: section.model_copy(update={"path": path})})
        found: str = getattr(resume.keep_revisions(changed), name).path
        return found

    assert kept() == "owner/name"
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    before = section.model_copy(update={"path": str(snapshot)})
    folder = tmp_path / "again"
    folder.mkdir()
    RunDir(folder).resolved.write_text(dump_resolved(config.model_copy(update={name: before})))
    assert kept() == "owner/name@abc"
    assert kept("owner/name@def") == "owner/name@def"
    assert kept("owner/other") == "owner/other"


def test_a_run_goes_on_with_the_revision_of_a_reward_model_that_it_fetched_at_first(
    values: dict[str, Any], tmp_path: Path
) -> None:
    def config_with(path: str) -> Config:
        return Config(**{**values, "reward": {"fn": ["gsm8k", {"fn": "model", "path": path, "label": 1}]}})

    def kept(path: str) -> tuple[str, dict[str, Any]]:
        plain, judge = resume.keep_revisions(config_with(path)).reward.fn
        return plain.fn, judge.arguments

    snapshot = tmp_path / "hub" / "models--owner--judge" / "snapshots" / "abc"
    folder = tmp_path / "again"
    folder.mkdir()
    RunDir(folder).resolved.write_text(dump_resolved(config_with(str(snapshot))))
    assert kept("owner/judge") == ("gsm8k", {"path": "owner/judge@abc", "label": 1})
    assert kept("owner/judge@def")[1]["path"] == "owner/judge@def"
    assert kept("owner/other")[1]["path"] == "owner/other"


def test_a_run_of_an_older_version_is_named_as_such(values: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "again"
    folder.mkdir()
    config = Config(**values)
    text = dump_resolved(config)
    RunDir(folder).resolved.write_text(text + "critics: {}\n")
    said = "^the run in .*again is of an older asyncrl, .*unknown section 'critics'"
    for read in (lambda: resume.keep_revisions(config), lambda: load_resolved(folder, ["run.seed=1"])):
        with pytest.raises(ConfigError, match=said) as caught:
            read()
        assert "\n" not in str(caught.value)
    RunDir(folder).resolved.write_text(text)
    assert load_resolved(folder, ["run.seed=1"]).run.seed == 1
    with pytest.raises(ConfigProblems, match="seeed"):
        load_resolved(folder, ["run.seeed=1"])


def test_a_run_that_had_no_critic_of_its_own_keeps_no_revision_for_one(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["algorithm"] = {"advantage": "gae"}
    folder = tmp_path / "again"
    folder.mkdir()
    RunDir(folder).resolved.write_text(dump_resolved(Config(**values)))
    kept = resume.keep_revisions(Config(**values, critic={"path": "owner/name"}))
    assert kept.critic.path == "owner/name"


@pytest.mark.parametrize(
    ("before", "after", "is_refused"),
    [("grpo", "remax", True), ("remax", "remax", False), ("remax", "grpo", False), ("grpo", "rloo", False)],
)
def test_a_run_does_not_go_on_with_remax_when_its_groups_have_no_greedy_answers(
    values: dict[str, Any], tmp_path: Path, before: str, after: str, is_refused: bool
) -> None:
    folder = RunDir(tmp_path / "again")
    folder.path.mkdir()
    folder.resolved.write_text(dump_resolved(Config(**values, algorithm={"advantage": before})))
    said = r"advantage: was 'grpo', is 'remax', which needs a greedy answer.*\n?.*Choose another run.name"
    with pytest.raises(ConfigError, match=said) if is_refused else contextlib.nullcontext():
        resume.refuse_other_lineage(folder, Config(**values, algorithm={"advantage": after}))


@pytest.mark.parametrize(
    ("before", "after", "is_refused"),
    [
        (("gae", "a"), ("gae", "b"), True),
        (("gae", "a"), ("gae", "a"), False),
        (("grpo", None), ("gae", None), True),
        (("gae", "a"), ("grpo", None), False),
        (("gae", "a"), ("vtrace", "a"), False),
    ],
)
def test_a_run_goes_on_with_the_critic_that_its_checkpoints_hold(
    values: dict[str, Any],
    tmp_path: Path,
    before: tuple[str, str | None],
    after: tuple[str, str | None],
    is_refused: bool,
) -> None:
    def make(advantage: str, critic: str | None) -> Config:
        extra = {"critic": {"path": critic}} if critic else {}
        return Config(**values, algorithm={"advantage": advantage}, **extra)

    folder = RunDir(tmp_path / "again")
    folder.path.mkdir()
    folder.resolved.write_text(dump_resolved(make(*before)))
    with pytest.raises(ConfigError, match="critic: was") if is_refused else contextlib.nullcontext():
        resume.refuse_other_lineage(folder, make(*after))


def test_what_a_start_writes_down_outlives_the_machine(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = set(), os.fsync

    def note(descriptor: int) -> None:
        synced.add(
            re.sub(r"^\.(.*)\.\d+\.\d+$", r"\1", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    started = run.start(Config(**values))
    started.stop(60.0)
    assert synced == {"run.json", "resolved.yaml", "config.yaml", "again"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run_id": "a"'])
def test_a_file_that_died_with_the_machine_is_as_if_it_was_never_written(tmp_path: Path, text: str) -> None:
    folder = RunDir(tmp_path / "again")
    folder.path.mkdir()
    folder.live.write_text(text)
    assert attach(folder) is None and run._earlier_starts(folder) == ()
    with pytest.raises(NotRunning):
        find_live_folder(str(tmp_path), None)


def test_a_run_is_live_from_the_moment_its_head_is_started_and_can_be_ended_in_order(
    values: dict[str, Any], tmp_path: Path
) -> None:
    started = run.start(Config(**values))
    found = attach(RunDir(tmp_path / "again"))
    assert found is not None and found.pid == started.pid
    assert found.await_end(60.0, lambda snapshot: None)
    started.clear()
    assert started.result().state == "stopped"


def test_nothing_of_how_the_last_life_ended_or_what_it_owed_is_left_to_the_next(
    values: dict[str, Any], tmp_path: Path
) -> None:
    folder, config = RunDir(tmp_path / "again"), Config(**values)
    folder.path.mkdir()
    for path in (folder.outcome, folder.phase, folder.pending_checkpoint):
        path.write_text("{}")
    run._write_down(folder, config, config)
    assert sorted(os.listdir(folder.path)) == ["config.yaml", "resolved.yaml"]


def test_a_project_that_was_moved_goes_on_with_its_own_files_and_with_no_others(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """The run, its model and its data lie in one folder, which is called another name now."""
    old, new = tmp_path / "old", tmp_path / "new"
    before = Config(
        **values
        | {
            "run": {"name": "again", "dir": f"{old}/runs"},
            "model": {"path": f"{old}/model"},
            "data": {"train": f"{old}/runs/builtin/digit_sort/train.parquet"},
        }
    )
    text = dump_resolved(before).replace(str(old), str(new))
    folder = RunDir(new / "runs" / "again")
    folder.path.mkdir(parents=True)
    folder.resolved.write_text(dump_resolved(before))
    (tmp_path / "now.yaml").write_text(text)
    now = load_config(tmp_path / "now.yaml")
    assert now.run.dir != before.run.dir
    resume.refuse_other_lineage(folder, now)
    assert compare_with_run(folder, now) == [], "plan says the same"
    for key, path in (("model.path", f"{new}/other"), ("data.train", f"{new}/other.jsonl")):
        other = load_config(tmp_path / "now.yaml", [f"{key}={path}"])
        said = rf"{key}: was '[^']*', is '{path}'; .*\. Give them as they were to go on"
        with pytest.raises(ConfigError, match=said):
            resume.refuse_other_lineage(folder, other)
        (change,) = compare_with_run(folder, other)
        assert change.key == key and not change.at_resume


def test_runs_that_were_moved_alone_go_on_with_the_model_that_stayed(
    values: dict[str, Any], tmp_path: Path
) -> None:
    before = Config(**values | {"run": {"name": "again", "dir": f"{tmp_path}/runs"}})
    folder = RunDir(tmp_path / "elsewhere" / "runs" / "again")
    folder.path.mkdir(parents=True)
    folder.resolved.write_text(dump_resolved(before))
    here = {"name": "again", "dir": str(folder.path.parent)}
    resume.refuse_other_lineage(folder, Config(**values | {"run": here}))
