"""`asyncrl eval`: a model folder or a run's checkpoint against held-out prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from asyncrl.cli.reports.evaluation import Wishes, read_target, table_of
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from learner.batching.batch import build_batch
from learner.checkpoint import CheckpointStore
from rollout_service.tasks.digit_sort.examples import draw_split
from rollout_service.tasks.digit_sort.folder import write_prompts
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from rollout_service.tasks.digit_sort.warm_start import build_model
from tests.different import assert_all_differ, digests_of
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import open_backend

ROOT = Path(__file__).resolve().parents[2]
METRICS = {"accuracy": 0.5, "val-core/a/acc/mean@2": 0.5, "val-core/a/acc/mean@2/low": 0.25}
METRICS |= {"val-core/a/acc/mean@2/high": 0.75, "val-aux/num_prompts": 8.0}


def evaluate(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "eval", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_model(0).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    write_prompts(folder / "eval.parquet", draw_split(0, 50, 12).held_out, "eval")
    return folder


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory):
    """Return a folder with the run `mine`, which has a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    folder.mkdir()
    sections = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": "x", "eval": str(model / "eval.parquet"), "max_prompt_tokens": 16},
        "reward": {"fn": "digit_sort"},
        "rollout": {"max_tokens": 6, "temperature": 1.0},
        "eval": {"samples": 3},
    }
    (folder / "resolved.yaml").write_text(dump_resolved(Config(**sections)))
    store = CheckpointStore(folder / "checkpoints", keep=3, keep_best=1)
    backend = open_backend(model, dtype="float32")
    groups = make_groups(vocab_size=len(build_tokenizer()))
    batch = build_batch(groups, 0, {1: 0}).select_groups([group.ticket for group in groups])
    for _ in range(2):
        backend.update(batch, lambda logprobs_N, *_: (logprobs_N.mean(), {}))
    backend.save_state(store.prepare(2))
    store.seal(2, token=1)
    backend.save_hf(folder / "weights")
    backend.close()
    assert_all_differ(weights_in(one) for one in (model, folder / "weights"))
    return folder.parent


def weights_in(folder):
    return load_file(folder / "model.safetensors")


def test_the_table_shows_each_metric_with_its_interval():
    assert table_of(METRICS) == [
        "metric                 value  95 % interval",
        "val-core/a/acc/mean@2  0.5    0.2500 to 0.7500",
        "val-aux/num_prompts    8      -",
    ]


def test_only_the_result_goes_to_stdout(tmp_path):
    code = """
import subprocess, sys
from asyncrl.cli.reports.evaluation import talk_on_stderr
with talk_on_stderr():
    print("mine")
    subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
print("result")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "result\n"
    assert sorted(done.stderr.splitlines()) == ["mine", "of a child"]


def test_a_run_s_checkpoint_is_evaluated_as_the_run_does_it_unless_told_otherwise(runs, tmp_path):
    config = read_target("mine", str(runs), "newest", Wishes(), tmp_path)
    assert config.model.path == str(tmp_path / "model")
    assert digests_of(weights_in(tmp_path / "model")) == digests_of(weights_in(runs / "mine" / "weights"))
    assert len(AutoTokenizer.from_pretrained(config.model.path)) == len(build_tokenizer())
    assert (config.eval.samples, config.rollout.max_tokens, config.reward.fn[0].fn) == (3, 6, "digit_sort")
    other = tmp_path / "other"
    other.mkdir()
    wishes = Wishes(samples=8, temperature=0.5, max_tokens=4, reward="exact_match", prompts=5)
    config = read_target(str(runs / "mine"), "nowhere", "2", wishes, other)
    assert (config.eval.samples, config.eval.temperature, config.eval.prompts) == (8, 0.5, 5)
    assert (config.rollout.max_tokens, config.reward.fn[0].fn) == (4, "exact_match")


def test_a_model_folder_keeps_its_dtype(model, tmp_path):
    wishes = Wishes(data=[str(model / "eval.parquet")], reward="digit_sort")
    config = read_target(str(model), str(tmp_path), "newest", wishes, tmp_path)
    assert config.model.dtype == "float32"
    assert config.data.max_prompt_tokens + config.rollout.max_tokens == 1024, "what the model can see"
    assert [source.path for source in config.data.eval] == [str(model / "eval.parquet")]


def test_a_reward_may_have_arguments(model, tmp_path):
    wishes = Wishes(data=[str(model / "eval.parquet")], reward="{fn: format, pattern: '[0-9]+', weight: 0.5}")
    (part,) = read_target(str(model), str(tmp_path), "newest", wishes, tmp_path).reward.fn
    assert (part.fn, part.weight, dict(part.arguments)) == ("format", 0.5, {"pattern": "[0-9]+"})
    broken = Wishes(data=wishes.data, reward="{fn: format, weight: much}")
    with pytest.raises(ConfigError, match="weight"):
        read_target(str(model), str(tmp_path), "newest", broken, tmp_path)


@pytest.mark.parametrize(
    ("target", "wishes", "message"),
    [
        ("nowhere", Wishes(), "there is no run 'nowhere'"),
        ("mine", Wishes(data=["gone.parquet"]), "does not exist"),
        ("mine", Wishes(temperature=0.0), "repeats the same answer"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_an_engine_starts(runs, tmp_path, target, wishes, message):
    with pytest.raises(ConfigError, match=message):
        read_target(target, str(runs), "newest", wishes, tmp_path)


def test_a_model_folder_alone_is_not_enough(model, tmp_path):
    with pytest.raises(ConfigError, match="says no --data and no --reward"):
        read_target(str(model), str(tmp_path), "newest", Wishes(), tmp_path)
    done = evaluate(model, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_model_s_answers_are_counted_with_the_real_vllm(model, runs, tmp_path):
    data = ("--data", model / "eval.parquet", "--max-tokens", 6)
    done = evaluate(model, *data, "--reward", "digit_sort", "--samples", 4, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)["metrics"]
    assert metrics["val-aux/num_prompts"] == 12
    assert metrics["val-core/held_out/acc/mean@4"] <= metrics["val-core/held_out/acc/pass@4"]
    done = evaluate("mine", "--dir", runs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "val-core/held_out/acc/maj@3" in done.stdout
    assert not list((runs / "mine").glob("export*")), "the run is left as it was"
