"""Going on with an earlier life: from which checkpoint, and what an earlier life is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.journals.kind import open_journal
from asyncrl.buffer.store import ExperienceStore
from asyncrl.cli.run import start as run
from asyncrl.cli.run.resume import (
    ABANDONED,
    check_step,
    checkpoint_name,
    differences,
    refuse_earlier_life,
    rewind,
)
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.rows.row_files import load_rows
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError, ConfigError
from asyncrl.core.experience import encode_group
from asyncrl.core.runtime.threads import ThreadEvent
from learner.checkpoint import CheckpointStore, Commit
from learner.leader.leader import Leader
from learner.orders import Restore
from tests.buffer.parts import GROUP_SIZE, make_group, serving
from tests.planner.plan.model_folder import write_model_folder


def make_config(folder: Path, **sections: object) -> Config:
    values: dict[str, object] = {
        "run": {"name": "again", "dir": str(folder)},
        "model": {"path": "m"},
        "data": {"train": "t"},
        "reward": {"fn": "gsm8k"},
        "rollout": {"group_size": GROUP_SIZE},
        "learner": {"groups_per_step": 1, "minibatches": 1},
    }
    return Config.model_validate({**values, **sections})


def train_three_steps(store: ExperienceStore, checkpoints: CheckpointStore) -> None:
    """Three steps of one group, with committed checkpoints of steps 1 and 3."""
    ledger = store.ledger
    ledger.describe_data(100, "digest")
    token = ledger.open("learner")
    for step in range(3):
        version = ledger.register_version(token, step)
        (grant,) = ledger.lease("a", version, 1, 0.0)
        store.push(
            "a", grant.ticket, grant.attempt, encode_group(make_group(grant.ticket, grant.attempt, version))
        )
        store.commit(0.0)
        assert ledger.reserve(token, step, 0.0) is not None
        ledger.trained(token, step, lag_max=0)
        if step != 1:
            checkpoints.prepare(step + 1)
            digest = checkpoints.seal(step + 1, token)
            ledger.checkpointed(token, step + 1, digest, [1] if step == 0 else [1, 3])
        store.commit(0.0)
    checkpoints.prepare(2)
    checkpoints.seal(2, token)  # the journal does not know it


@pytest.fixture
def folder(tmp_path: Path) -> RunDir:
    """An ended run of three steps."""
    config = make_config(tmp_path)
    folder = RunDir(tmp_path / "again")
    folder.path.mkdir()
    folder.resolved.write_text(dump_resolved(config))
    with closing(open_journal(config.buffer, folder.path)) as journal:
        store = ExperienceStore(ledger_settings(config), journal, GROUP_SIZE, True, now=0.0)
        train_three_steps(store, CheckpointStore(folder.checkpoints, keep=9))
    rows: list[dict[str, float]] = [{"training/global_step": step} for step in (1, 2, 3)]
    rows.append({"training/global_step": 3, "val-core/x/acc/mean@1": 0.5})
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def verified(folder: RunDir) -> Callable[[int], None]:
    return CheckpointStore(folder.checkpoints, 1).verify_whole


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_can_go_on_from_every_checkpoint_of_its_journal(folder: RunDir, step: int) -> None:
    check_step(folder, step, verified(folder))


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_step_without_a_committed_checkpoint_is_refused_with_those_that_there_are(
    folder: RunDir, step: int
) -> None:
    with pytest.raises(ConfigError, match=f"--resume {step}: .*it can from steps 1, 3"):
        check_step(folder, step, verified(folder))


def test_a_checkpoint_that_is_torn_is_refused(folder: RunDir) -> None:
    (folder.checkpoints / checkpoint_name(3) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError):
        check_step(folder, 3, verified(folder))


def test_a_run_that_never_was_can_go_on_from_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no past"):
        check_step(RunDir(tmp_path), 1, lambda step: None)


def test_going_back_puts_later_checkpoints_aside_and_the_next_start_finds_that_one_the_newest(
    folder: RunDir,
) -> None:
    store = CheckpointStore(folder.checkpoints, 9)
    assert rewind(folder, 1) == folder.checkpoints / ABANDONED
    assert store.steps() == [1]
    kept = CheckpointStore(folder.checkpoints / ABANDONED, 9)
    assert kept.steps() == [2, 3]
    kept.verify_whole(3)
    with closing(open_journal(make_config(folder.path.parent).buffer, folder.path)) as journal:
        settings = ledger_settings(make_config(folder.path.parent))
        ledger = ExperienceStore(settings, journal, GROUP_SIZE, True, now=0.0).ledger
        commits = [Commit(one.token, one.step, one.digest) for one in ledger.checkpoints()]
    newest = store.newest_valid(commits, lambda warning: None)
    assert newest is not None and newest.step == 1


def test_going_back_a_second_time_replaces_what_was_put_aside(folder: RunDir) -> None:
    rewind(folder, 1)
    store = CheckpointStore(folder.checkpoints, 9)
    store.prepare(3)
    store.seal(3, token=9)
    rewind(folder, 1)
    assert store.steps() == [1]
    assert CheckpointStore(folder.checkpoints / ABANDONED, 9).steps() == [2, 3]


def test_going_back_drops_the_rows_of_later_steps_and_keeps_evaluations(folder: RunDir) -> None:
    for path in folder.learner_rows:
        path.write_bytes(folder.metrics.read_bytes())
    rewind(folder, 1)
    for rows in (folder.metrics, *folder.learner_rows):
        assert [row["training/global_step"] for row in load_rows(rows)] == [1, 3]


def test_nothing_is_put_aside_when_there_is_nothing_later(folder: RunDir) -> None:
    assert rewind(folder, 3) is None


def test_a_fresh_start_is_refused_where_there_is_something_to_go_on_from(folder: RunDir) -> None:
    with pytest.raises(
        ConfigError, match=r"--resume never: .* checkpoints of steps 1, 2, 3.*remove that folder"
    ):
        refuse_earlier_life(folder)
    refuse_earlier_life(RunDir(folder.path / "empty"))


def test_a_fresh_start_is_all_that_a_run_without_a_journal_can_have(folder: RunDir) -> None:
    config = make_config(folder.path.parent, buffer={"journal": "none"})
    folder.resolved.write_text(dump_resolved(config))
    refuse_earlier_life(folder)


def test_each_key_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    one, other = make_config(tmp_path), make_config(tmp_path, staleness={"max_lag": 7}, reward={"fn": "math"})
    assert differences(one, one) == []
    found = differences(one, other)
    assert [line.partition(":")[0] for line in found] == ["reward.fn", "staleness.max_lag"]
    assert found[1].endswith("there, 7 here")


@pytest.fixture
def start(folder: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Start the run again, which ends where its head would begin."""
    model = write_model_folder(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    data = {"train": str(tmp_path / "train.jsonl")}
    config = make_config(tmp_path, model={"path": str(model)}, data=data)
    folder.resolved.write_text(dump_resolved(config))
    monkeypatch.setattr(run, "_start_head", lambda *_: "started")
    return lambda: run.start(config)


def test_a_run_without_any_checkpoint_that_its_journal_knows_is_refused_before_its_head_is_started(
    folder: RunDir, start: Callable[[], object]
) -> None:
    assert start() == "started"
    shutil.rmtree(folder.checkpoints / checkpoint_name(1))
    assert start() == "started", "one is enough"
    shutil.rmtree(folder.checkpoints / checkpoint_name(3))
    said = "knows the checkpoints of steps 1, 3, and none of them is in .*put one of them back there"
    with pytest.raises(ConfigError, match=said):
        start()


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_run_whose_journal_is_gone_is_refused_beside_checkpoints(
    folder: RunDir, start: Callable[[], object], is_empty: bool
) -> None:
    shutil.rmtree(folder.path / "buffer")
    if is_empty:
        open_journal(make_config(folder.path).buffer, folder.path).close()
    with pytest.raises(ConfigError, match=r"the journal of .* is gone.* steps 1, 2, 3. Put the journal back"):
        start()
    shutil.rmtree(folder.checkpoints)
    assert start() == "started", "it never came to a checkpoint"


def test_another_model_under_the_same_path_is_refused_before_its_head_is_started(
    folder: RunDir, start: Callable[[], object]
) -> None:
    record = folder.checkpoints / checkpoint_name(3) / "rank-00000.json"
    record.write_text(json.dumps({"pieces": [{"name": "model.norm.weight", "shape": [4]}]}))
    assert start() == "started"
    record.write_text(json.dumps({"pieces": [{"name": "model.norm.weight", "shape": [8]}]}))
    with pytest.raises(ConfigError, match=r"model\.path: .*another model.*weight as \(8,\), .* as \(4,\)"):
        start()


def open_leader(client: LearnerClient, folder: RunDir, checkpoints: str) -> Leader:
    store = CheckpointStore(folder.path / checkpoints, 3)
    return Leader(make_config(folder.path.parent), client, lambda token: None, store)


@pytest.fixture
def client(folder: RunDir) -> Iterator[LearnerClient]:
    """A learner's client of the ended run's buffer, which serves again."""
    config = make_config(folder.path.parent)
    journal = open_journal(config.buffer, folder.path)
    store = ExperienceStore(ledger_settings(config), journal, GROUP_SIZE, True, now=0.0)
    with serving(store) as service, closing(LearnerClient(service.status().address)) as client:
        yield client


def test_a_learner_whose_checkpoints_are_all_gone_is_not_started_again(
    folder: RunDir, client: LearnerClient
) -> None:
    leader = open_leader(client, folder, "elsewhere")
    with pytest.raises(
        ConfigError, match=r"step 3 is torn: .*is missing; step 1 is torn.*Restore one of these"
    ):
        next(leader.orders(ThreadEvent()))
    assert leader.torn == [], "it goes on from nowhere"


def test_a_resume_from_before_checkpoints_that_the_journal_does_not_know_says_so(
    folder: RunDir, client: LearnerClient
) -> None:
    store = CheckpointStore(folder.checkpoints, 9)
    for step in (5, 6):
        store.prepare(step)
        store.seal(step, token=1)
    leader = open_leader(client, folder, "checkpoints")
    assert next(leader.orders(ThreadEvent())) == Restore(3, has_checkpoint=True, controllers={})
    (said,) = leader.torn
    assert said.startswith("the journal does not know the checkpoints of steps 5, 6 in ")
    assert said.endswith("; going on from step 3")
