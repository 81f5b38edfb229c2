"""A run that records what it trains on, and the same steps trained again from its folder alone."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.errors import CheckpointError, ConfigError, DataError, FencedError
from asyncrl.core.runtime.threads import ThreadEvent
from learner.backend import Models
from learner.checkpoint import CheckpointStore
from learner.checkpoint.snapshot import tensor_file
from learner.checkpoint.store import MANIFEST, Cut, digest_file
from learner.megatron.backend import MegatronValueBackend
from learner.ranks import Ranks
from learner.record.batch_store import FOLDER, BatchStore, RecordedStep, RecordedWeights, name_steps
from learner.record.comparison import Difference
from learner.record.recorder import Recorder
from learner.record.replay import replay_run
from learner.record.state import compare_state
from learner.trainer import CRITIC
from tests.learner.guard.guarded_run import Faults, Run, make_config, running
from tests.learner.parts.training import open_backend, open_objective
from tests.learner.streaming.feeding import Feeding
from tests.weight_sync.cluster import Cluster, running_cluster

ALGORITHM = {"veto": 1e-3}
SECTIONS = {
    "run": {"record": True},
    "learner": {"steps": 7, "weight_decay": 0.01, "warmup_steps": 0},
    "checkpoint": {"every_steps": 2, "keep": 3},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started


@pytest.fixture(scope="module")
def recorded(model: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of seven steps, killed after four and resumed."""
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    first = SECTIONS | {"learner": SECTIONS["learner"] | {"steps": 5}}
    go(model, cluster, folder, first)
    # The last checkpoint is lost with the machine: step 4 is trained, and recorded, again.
    shutil.rmtree(CheckpointStore(folder / "checkpoints", 3).folder(5))
    go(model, cluster, folder, SECTIONS)
    (folder / "resolved.yaml").write_text(dump_resolved(make_config(model, algorithm=ALGORITHM, **SECTIONS)))
    return folder


def go(model: Path, cluster: Cluster, folder: Path, sections: dict) -> Run:
    with running(model, cluster, folder, Faults(), ALGORITHM, **sections) as run:
        run.go()
    return run


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copytree(recorded, tmp_path / "recorded"))


def replayed(folder: Path, *given, **options):
    return replay_run(str(folder), "runs", *given, **options)


def flip_bit(path: Path, from_end: int) -> None:
    data = bytearray(path.read_bytes())
    data[-from_end] ^= 1
    path.write_bytes(data)


def test_recorded_steps_train_again_bit_by_bit_from_a_checkpoint(recorded: Path):
    found = replayed(recorded, 5, 2)
    assert (found.began_at, [step.step for step in found.steps]) == (4, [4, 5, 6])
    assert found.is_exact
    assert all(step.num_metrics > 40 for step in found.steps)
    assert any(step.has_weights for step in found.steps), "no weights were compared"


def test_the_record_goes_as_far_back_as_the_oldest_checkpoint_that_is_kept(recorded: Path):
    batch_store = BatchStore(recorded / FOLDER)
    assert CheckpointStore(recorded / "checkpoints", 3).steps() == [4, 6, 7]
    assert batch_store.steps() == [4, 5, 6]
    # A response token takes nine bytes and a prompt token four; the rest is of the step and the groups.
    groups = [group for step in batch_store.steps() for group in batch_store.read(step, 0).groups]
    tokens = sum(9 * group.num_response_tokens + 4 * len(group.prompt_ids) for group in groups)
    assert tokens < batch_store.num_bytes() < tokens + 3 * 8000


def test_a_changed_rate_is_named_with_the_first_step_and_metric_that_it_changes(recorded: Path):
    found = replayed(recorded, 4, 3, overrides=["learner.lr=2e-4"], stops=True)
    step = found.first_to_differ()
    difference = step.differences[0]
    assert (step.step, difference.name) == (4, "actor/lr")
    assert (difference.recorded, difference.replayed) == (1e-4, 2e-4)
    assert len(found.steps) == 1, "it went on after the first step that differs"


def test_what_is_set_holds_from_the_first_step_that_is_asked_for_and_not_before(recorded: Path):
    asked = ["replay", "recorded", "--from", "5", "--steps", "1", "--dir", str(recorded.parent)]
    done = CliRunner().invoke(app, [*asked, "--set", "learner.lr=2e-6", "--diff"])
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("first difference: step 5, actor/lr: recorded 0.0001, replayed 2e-06\n")
    assert done.stderr.splitlines()[0] == "step 4 as in the run, then learner.lr=2e-6"
    assert re.search(r"^step 4: \d+ metrics equal", done.stderr, re.M)
    # What is set to what it was changes nothing: the state goes over whole.
    assert replayed(recorded, 5, 2, overrides=["learner.lr=1e-4"]).is_exact


def test_a_step_on_the_way_that_differs_is_told_and_does_not_end_the_replay(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    step = batch_store.read(4, 0)
    batch_store.write(replace(step, metrics={**step.metrics, "actor/lr": 0.5}))
    asked = ["replay", "recorded", "--from", "5", "--steps", "1", "--diff", "--dir", str(folder.parent)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1
    assert done.stdout == (
        "first difference on the way to step 5: step 4, actor/lr: recorded 0.5, replayed 0.0001\n"
    )
    done = CliRunner().invoke(app, [*asked, "--set", "learner.lr=2e-6"])
    assert "\nfirst difference: step 5, actor/lr: recorded 0.0001, replayed 2e-06\n" in done.stdout


def test_the_weights_that_differ_are_not_counted_among_the_metrics(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    step = batch_store.read(4, 0)
    metrics = {**step.metrics, "actor/lr": 0.5, "of_an_older_asyncrl": 1.0}
    batch_store.write(replace(step, metrics=metrics))
    batch_store.write_weights(RecordedWeights(5, "0" * 32, 4096))
    (compared,) = replayed(folder, 4, 1).steps
    names = [difference.name for difference in compared.differences]
    assert names == ["actor/lr", "of_an_older_asyncrl", "weights"]
    assert str(compared) == f"step 4: 2 of {len(metrics)} metrics differ, weights different"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([6], "step 6"),
        ([4, 5], "steps 4 and 5"),
        ([4, 5, 6], "steps 4 to 6"),
        ([0, 1, 2, 3, 5, 8, 9], "steps 0 to 3, 5, 8 and 9"),
        ([1, 7, 8, 9], "steps 1 and 7 to 9"),
    ],
)
def test_steps_are_named_as_a_person_would(steps: list[int], words: str):
    assert name_steps(steps) == words


def test_one_step_that_is_equal_is_told_in_the_singular(folder: Path):
    asked = ["replay", "recorded", "--from", "6", "--dir", str(folder.parent)]
    state = "optimizer, critic, generators and controllers"
    done = CliRunner().invoke(app, asked)
    assert done.stdout.splitlines() == [
        "step 6: all metrics and the weights are bit by bit those of the run",
        f"{state}: bit by bit those of the checkpoint of step 7",
    ]
    BatchStore(folder / FOLDER).weights_path(7).unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000007")
    done = CliRunner().invoke(app, asked)
    assert done.stdout.splitlines() == [
        "step 6: all metrics are bit by bit those of the run; it recorded no weights there",
        f"{state} were not compared: the run has no checkpoint after this step",
    ]


def test_the_model_of_the_start_is_not_called_a_checkpoint(resumed: Path):
    with pytest.raises(DataError) as caught:
        replayed(resumed, 9)
    assert caught.value.hint == (
        "Recorded are steps 0 to 3; a replay can begin with the model of the start or the checkpoints of "
        "steps 2 and 4"
    )


COURSE = {"lr_schedule": "cosine:0.1"}


@pytest.fixture(scope="module")
def resumed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps that was resumed for two more, with another learning rate."""
    folder = tmp_path_factory.mktemp("runs") / "resumed"
    first = SECTIONS | {"learner": SECTIONS["learner"] | COURSE | {"steps": 2}}
    second = SECTIONS | {"learner": SECTIONS["learner"] | COURSE | {"steps": 4, "lr": 3e-4}}
    with running_cluster() as own_cluster:
        go(model, own_cluster, folder, first)
        go(model, own_cluster, folder, second)
    (folder / "resolved.yaml").write_text(dump_resolved(make_config(model, algorithm=ALGORITHM, **second)))
    return folder


def test_steps_train_again_under_what_a_resume_has_changed_since(resumed: Path):
    said: list[str] = []
    found = replayed(resumed, 0, 4, say=said.append)
    assert found.is_exact, found
    assert (found.began_at, [step.step for step in found.steps]) == (0, [0, 1, 2, 3])
    assert said[0] == (
        "from step 2 on the run had learner.lr: 0.0003 in place of 0.0001, learner.steps: 4 in place of 2"
    )
    assert [step.has_state for step in found.steps] == [False, True, False, True]
    assert len(list((resumed / FOLDER).glob("settings-*.json"))) == 2, "one file per start, not per step"
    # What is asked for goes before what was recorded, in both starts.
    found = replayed(resumed, 0, 4, overrides=["learner.grad_clip=1e-4"])
    assert [bool(step.differences) for step in found.steps] == [True] * 4
    assert "actor/lr" not in {one.name for step in found.steps for one in step.differences}


def test_a_record_without_settings_is_trained_under_the_last_ones_and_that_is_said(
    resumed: Path, tmp_path: Path
):
    folder = Path(shutil.copytree(resumed, tmp_path / "old"))
    batch_store = BatchStore(folder / FOLDER)
    for step in batch_store.steps():
        batch_store.write(replace(batch_store.read(step, 0), settings=None))
    said: list[str] = []
    found = replayed(folder, 0, 4, stops=True, say=said.append)
    assert said[0].startswith("no configuration was recorded with steps 0 to 3, as by an older")
    step = found.first_to_differ()
    assert (step.step, step.differences[0]) == (0, Difference("actor/lr", 1e-4, 3e-4))


def test_settings_that_are_altered_or_gone_are_not_taken_for_others(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    path = batch_store.settings_path(batch_store.settings_digest(4))
    path.write_text(path.read_text().replace("0.0001", "0.0002"))
    with pytest.raises(CheckpointError, match="is altered"):
        replayed(folder, 4, 1)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"settings-.* is missing"):
        replayed(folder, 4, 1)


def test_an_override_that_does_not_fit_the_recorded_settings_is_refused(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    step = batch_store.read(4, 0)
    batch_store.write(replace(step, settings={**step.settings, "algorithm": {"loss": 3}}))
    with pytest.raises(ConfigError, match=r"recorded under cannot be used: algorithm\.loss"):
        replayed(folder, 4, 1)
    batch_store.write(step)
    step = batch_store.read(5, 0)
    batch_store.write(replace(step, settings={**step.settings, "algorithm": {"loss": 3}}))
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"recorded under cannot be used: algorithm\.loss"):
        replayed(folder, 5, 1, say=said.append)
    assert not [sentence for sentence in said if sentence.startswith("step 4")], "step 4 was trained first"


def test_a_moment_of_the_optimizer_that_is_not_the_checkpoint_s_is_named(folder: Path):
    assert all(step.has_state == (step.step in (5, 6)) for step in replayed(folder, 4, 3).steps)
    path = tensor_file(folder / "checkpoints" / "step-00000007", 0)
    tensors = load_file(path)
    key = next(name for name in tensors if name.endswith(".exp_avg_sq"))
    tensors[key].view(-1)[3] += 1.0
    save_file(tensors, path)
    seal_again(path.parent)
    found = replayed(folder, 4, 3, stops=True)
    step = found.first_to_differ()
    difference = step.differences[0]
    assert (step.step, difference.name) == (6, "optimizer")
    assert re.fullmatch(r"step 6: \d+ metrics equal, weights .*, checkpoint different", str(step))
    assert str(difference.recorded).startswith("exp_avg_sq of ")
    assert str(difference.replayed).endswith("; 1 in all differ")
    path.write_bytes(path.read_bytes()[:100])
    assert [one.name for one in replayed(folder, 6, 1).steps[-1].differences] == ["checkpoint"]


def seal_again(folder: Path) -> None:
    """Let the manifest say what the files are."""
    path = folder / MANIFEST
    body = json.loads(path.read_text())["body"]
    body["files"] = {name: digest_file(folder / name) for name in body["files"]}
    digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps({"digest": digest, "body": body}))


def test_each_part_of_the_state_has_its_name(model: Path, tmp_path: Path):
    objective = open_objective(advantage="gae", kl={"coef": 0.1, "adaptive": {}})
    ranks, store = Ranks(0, 1, torch.device("cpu")), CheckpointStore(tmp_path, 3)
    models = Models(open_backend(model), critic=open_backend(model, None, MegatronValueBackend))
    with contextlib.closing(models):
        folder = store.prepare(4)
        models.policy.save_state(folder)
        models.critic.save_state(folder / CRITIC)
        store.seal(4, 7, Cut(0, {"objective": objective.read_controllers()}))

        def compare(step: int = 4, token: int = 7) -> list[str] | None:
            found = compare_state(store, step, token, models, objective, ranks)
            return None if found is None else [one.name for one in found]

        assert compare() == []
        assert compare(step=5) is None, "there is none"
        assert compare(token=8) is None, "it is of another branch"
        models.critic.set_lr(0.5)
        assert compare() == ["critic"]
        torch.rand(1)
        objective.restore_controllers({"kl_coef": 0.2})
        models.policy.set_lr(0.5)
        assert compare() == ["optimizer", "critic", "generators", "controllers"]


def test_a_changed_bit_in_a_recorded_group_is_named(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    ticket = batch_store.read(5, 0).groups[-1].ticket
    flip_bit(batch_store.batch_path(5, 0), 3)
    with pytest.raises(CheckpointError, match=rf"the group of ticket {ticket} in .*step-00000005"):
        replayed(folder, 4, 3)


def test_a_changed_bit_in_the_rest_of_a_recorded_step_is_found(folder: Path):
    path = BatchStore(folder / FOLDER).batch_path(4, 0)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-00000004\.0\.batch is torn or altered"):
        replayed(folder, 4, 1)


def test_a_step_that_is_not_recorded_is_named(folder: Path):
    for given in ((5, 3), (7,), (99,)):
        with pytest.raises(DataError, match=f"step {max(given[0], 7)} is not in the record"):
            replayed(folder, *given)
    BatchStore(folder / FOLDER).batch_path(5, 0).unlink()
    with pytest.raises(DataError, match=r"step 5 is not in the record .* Recorded are steps 4 and 6;"):
        replayed(folder, 4, 3)


def test_without_a_checkpoint_before_it_a_step_cannot_be_trained_again(folder: Path):
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(DataError, match="no checkpoint at or before step 5"):
        replayed(folder, 5, 1)


def test_a_run_that_recorded_nothing_says_so(folder: Path):
    shutil.rmtree(folder / FOLDER)
    with pytest.raises(ConfigError, match="has recorded nothing"):
        replayed(folder)


def test_the_command_says_what_differs_by_its_exit_code(recorded: Path):
    runs = ["--dir", str(recorded.parent)]
    done = CliRunner().invoke(app, ["replay", "recorded", "--from", "5", "--steps", "1", *runs])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("steps 4 and 5: all metrics")
    changed = ["--set", "learner.grad_clip=1e-4", "--diff", *runs]
    done = CliRunner().invoke(app, ["replay", "recorded", *changed])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0].startswith("first difference: step ")
    done = CliRunner().invoke(app, ["replay", "recorded", "--json", *runs])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["is_exact"], found["began_at"], len(found["steps"])) == (True, 4, 3)


def test_a_number_that_json_has_no_word_for_is_null_in_the_output(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    step = batch_store.read(6, 0)
    batch_store.write(replace(step, metrics={**step.metrics, "actor/lr": float("nan")}))
    done = CliRunner().invoke(
        app, ["replay", "recorded", "--from", "6", "--json", "--dir", str(folder.parent)]
    )
    (found,) = json.loads(done.stdout, parse_constant=pytest.fail)["steps"][-1]["differences"]
    assert found == {"name": "actor/lr", "recorded": None, "replayed": 1e-4}


def test_a_checkpoint_of_other_weights_than_the_run_had_there_is_refused(folder: Path):
    BatchStore(folder / FOLDER).write_weights(RecordedWeights(4, "0" * 32, 4096))
    with pytest.raises(CheckpointError, match="the checkpoint of step 4 does not hold the weights"):
        replayed(folder, 4, 1)


def test_another_seed_than_the_run_s_is_refused(recorded: Path):
    with pytest.raises(ConfigError, match=r"step 4 was recorded with run\.seed 0"):
        replayed(recorded, 4, 1, overrides=["run.seed=1"])


def test_what_a_restore_goes_back_behind_leaves_the_record(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    for step in (5, 6, 7):
        batch_store.write_weights(RecordedWeights(step, "0" * 32, 4096))
    recorder = Recorder(batch_store, seed=0, max_stall_s=10.0)
    recorder.restart_at(5)
    recorder.close()
    assert batch_store.steps() == [4]
    assert [batch_store.read_weights(step) is not None for step in (5, 6, 7)] == [True, False, False]


def test_a_streamed_step_trains_again_in_the_parts_it_came_in(model: Path, tmp_path: Path):
    sections = {
        "run": {"record": True},
        "learner": {
            "stream": True,
            "groups_per_step": 3,
            "steps": 3,
            "weight_decay": 0.01,
            "warmup_steps": 0,
        },
        "checkpoint": {"every_steps": 100},
    }
    feeding = Feeding(3, lambda run, step, num_groups: None)
    faults = Faults(wrap=feeding.over)
    with (
        running_cluster() as own_cluster,
        running(model, own_cluster, tmp_path, faults, ALGORITHM, **sections) as run,
    ):
        feeding.run = run
        run.learner.run(ThreadEvent())
    (tmp_path / "resolved.yaml").write_text(
        dump_resolved(make_config(model, algorithm=ALGORITHM, **sections))
    )
    recorded = BatchStore(tmp_path / FOLDER).read(1, 0)
    assert len(recorded.order.parts) == 3 and recorded.order.parts != sorted(recorded.order.parts)
    found = replayed(tmp_path)
    assert (found.began_at, len(found.steps), found.is_exact) == (0, 3, True), found


class SlowDisk(BatchStore):
    """Takes nothing until it is told to."""

    def write(self, recorded: RecordedStep) -> int:
        self.has_begun.set()
        if not self.may_write.wait(60.0):
            raise OSError("nobody let it write")
        return super().write(recorded)


def test_a_disk_that_takes_nothing_costs_steps_of_the_record_and_not_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    step = BatchStore(folder / FOLDER).read(5, 0)
    disk = SlowDisk(folder / "slow")
    for event in ("has_begun", "may_write"):
        object.__setattr__(disk, event, ThreadEvent())
    recorder = Recorder(disk, seed=0, max_stall_s=0.01)
    recorder.flush()
    waited_s = []
    put = recorder._pending.put
    monkeypatch.setattr(
        recorder._pending, "put", lambda job, timeout: (waited_s.append(timeout), put(job, timeout=timeout))
    )
    for number in range(6):
        take(recorder, step, number)
        assert disk.has_begun.wait(60.0)
    assert waited_s == [0.01] * 4 + [0.0] * 2, "it waits once for a disk that hangs"
    disk.may_write.set()
    put(None, timeout=10.0)
    recorder._thread.join(60.0)
    taken = recorder.take_metrics()
    assert taken["record/lost_steps"] == 3.0, "one is being written and two wait"
    assert disk.steps() == [0, 1, 2]
    assert taken["record/bytes"] == disk.num_bytes()


def take(recorder: Recorder, step: RecordedStep, number: int, **metrics) -> None:
    """Let the recorder take `step` as that of another number."""
    recorder.note_fetch(step.groups)
    recorder.take(replace(step.order, step=number), step.adjustment, {**step.metrics, **metrics})


def test_a_disk_that_is_full_loses_the_step_and_is_left_as_it_was(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    step = batch_store.read(5, 0)
    (batch_store.folder / ".step-00000003.0.batch.77").write_bytes(b"of a writer that died")
    (batch_store.folder / ".step-00000003.weights.77").write_bytes(b"of a writer that died")
    others = batch_store.folder / ".step-00000003.1.batch.77"
    others.write_bytes(b"of a rank that writes")
    recorder = Recorder(batch_store, seed=0, max_stall_s=10.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # Python ignores the signal
    try:
        take(recorder, step, 9)
        recorder.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert recorder.take_metrics() == {"record/bytes": 0.0, "record/lost_steps": 1.0}
    assert list(batch_store.folder.glob(".*")) == [others]
    take(recorder, step, 10)
    recorder.close()
    assert batch_store.steps() == [4, 5, 6, 10]


def test_a_record_that_cannot_be_made_or_tidied_costs_the_run_nothing(folder: Path):
    (folder / "file").write_text("no folder")
    recorder = Recorder(BatchStore(folder / "file"), seed=0, max_stall_s=10.0)
    recorder.restart_at(0)
    recorder.note_weights(3, "digest", 4096)
    recorder.close()
    assert recorder.take_metrics() == {"record/bytes": 0.0, "record/lost_steps": 1.0}
    batch_store = BatchStore(folder / FOLDER)
    batch_store.batch_path(4, 0).unlink()
    batch_store.batch_path(4, 0).mkdir()  # cannot be unlinked
    recorder = Recorder(batch_store, seed=0, max_stall_s=10.0)
    recorder.restart_at(4)
    recorder.remove_before(5)
    recorder.close()
    assert recorder.take_metrics()["record/lost_steps"] == 0.0


def test_a_step_that_cannot_be_packed_is_lost_alone(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    step = batch_store.read(5, 0)
    recorder = Recorder(batch_store, seed=0, max_stall_s=10.0)
    broken = replace(step, order=replace(step.order, limits=[("a lone surrogate \ud800", 1.0)]))
    take(recorder, broken, 7)
    take(recorder, step, 8, a_metric=torch.tensor(0.5))
    recorder.close()
    assert recorder.take_metrics()["record/lost_steps"] == 1.0
    assert batch_store.steps() == [4, 5, 6, 8] and batch_store.read(8, 0).metrics["a_metric"] == 0.5


def test_a_learner_that_was_fenced_replaces_nothing_of_a_newer_one(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    step = batch_store.read(5, 0)
    older = replace(step, order=replace(step.order, token=step.order.token - 1), metrics={})
    with pytest.raises(FencedError, match="no longer the newest"):
        batch_store.write(older)
    assert batch_store.read(5, 0).metrics == step.metrics
    batch_store.batch_path(5, 0).write_bytes(b"torn")
    batch_store.write(older)


def test_a_changed_bit_in_a_digest_of_weights_is_not_read_as_another_digest(folder: Path):
    batch_store = BatchStore(folder / FOLDER)
    batch_store.write_weights(RecordedWeights(5, "0" * 32, 4096))
    flip_bit(batch_store.weights_path(5), 20)
    with pytest.raises(CheckpointError, match=r"step-00000005\.weights is torn or altered"):
        batch_store.read_weights(5)


def test_the_first_step_by_default_is_one_that_all_recorded_steps_follow(folder: Path):
    BatchStore(folder / FOLDER).batch_path(4, 0).unlink()  # as where an older checkpoint is kept as the best
    assert CheckpointStore(folder / "checkpoints", 3).steps() == [4, 6, 7]
    assert replayed(folder).began_at == 6


def test_the_last_checkpoint_alone_does_not_empty_the_record(model: Path, recorded: Path, tmp_path: Path):
    with running_cluster() as own_cluster:
        run = go(model, own_cluster, tmp_path, SECTIONS | {"checkpoint": {"every_steps": 2, "keep": 1}})
    assert run.leader.checkpoints.oldest_kept_step == 7
    assert BatchStore(tmp_path / FOLDER).steps()[-1] == 6
    shutil.copy(recorded / "resolved.yaml", tmp_path)
    with pytest.raises(DataError) as caught:
        replayed(tmp_path)
    assert "checkpoint.keep" in caught.value.hint


def test_a_learner_that_fails_writes_down_what_it_trained(model: Path, tmp_path: Path):
    class Failed(Exception):
        pass

    class Client:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def trained(self, step, *given):
            if step == 1:
                raise Failed
            return self.inner.trained(step, *given)

    with (
        running_cluster() as own_cluster,
        running(model, own_cluster, tmp_path, Faults(wrap=Client), ALGORITHM, **SECTIONS) as run,
        pytest.raises(Failed),
    ):
        run.go()
    assert not [thread for thread in threading.enumerate() if thread.name == "recorder"]
    assert BatchStore(tmp_path / FOLDER).steps() == [0, 1]
