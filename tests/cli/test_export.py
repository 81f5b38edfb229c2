"""`asyncrl export`: a checkpoint of a run as a Hugging Face model, without starting anything."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError, ConfigError
from learner.checkpoint import CheckpointStore
from learner.checkpoint.export import export_run
from tests.cli.commands.calling import asyncrl
from tests.different import assert_all_differ, digests_of
from tests.learner.parts.samples import save_model
from tests.learner.parts.training import open_backend, train

STEP, EARLIER_STEP = 4, 2
PROMPT = [5, 17, 3, 99, 42]

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64,
          kv_cache_memory_bytes=16 << 20, distributed_executor_backend="uni")
prompts = [{"prompt_token_ids": json.loads(sys.argv[2])}]
answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, detokenize=False))
print("tokens", json.dumps(list(answers[0].outputs[0].token_ids)))
"""


def write_run(folder, model, dtype):
    """Write what a run leaves: its configuration and two checkpoints; return their weights by step."""
    folder.mkdir(parents=True)
    values = {
        "model": {"path": str(model), "dtype": dtype},
        "data": {"train": "x"},
        "reward": {"fn": "gsm8k"},
    }
    (folder / "resolved.yaml").write_text(dump_resolved(Config(**values)))
    store = CheckpointStore(folder / "checkpoints", keep=3, keep_best=1)
    backend, weights = open_backend(model, dtype=dtype), {}
    for begin, step in ((0, EARLIER_STEP), (EARLIER_STEP, STEP)):
        train(backend, range(begin, step))
        backend.save_state(store.prepare(step))
        store.seal(step, token=1)
        backend.save_hf(folder / f"weights-{step}")
        weights[step] = load_file(folder / f"weights-{step}" / "model.safetensors")
    store.note_score(EARLIER_STEP, 0.9)
    store.note_score(STEP, 0.1)
    backend.close()
    assert_all_differ(weights.values())
    return weights


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return (folder of the runs, weights of the run's checkpoints by step)."""
    runs = tmp_path_factory.mktemp("runs")
    model = save_model(runs / "builtin" / "model", "qwen2_tied")
    return runs, write_run(runs / "mine", model, "bfloat16")


def test_the_export_is_bit_for_bit_what_the_learner_held_and_transformers_runs_it(run, tmp_path, monkeypatch):
    runs, weights = run
    monkeypatch.chdir(tmp_path)
    done = asyncrl("export", "mine", "--step", str(STEP), "--to", "out/model", "--dir", runs)
    assert done.code == 0, done.err
    assert done.out.strip() == "out/model"
    exported = load_file(tmp_path / "out/model/model.safetensors")
    assert digests_of(exported) == digests_of(weights[STEP])
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    assert str(model.dtype) == "torch.bfloat16"
    assert model(torch.tensor([PROMPT])).logits.isfinite().all()


@pytest.mark.parametrize(("step", "found"), [("newest", STEP), ("best", EARLIER_STEP)])
def test_newest_and_best_are_steps_too_and_a_folder_in_use_is_refused(run, step, found):
    runs, weights = run
    target = export_run("mine", str(runs), step)
    assert target == runs / "mine" / "export" / f"step-{found:08d}"
    assert digests_of(load_file(target / "model.safetensors")) == digests_of(weights[found])
    with pytest.raises(ConfigError, match=r"exists. Name a folder"):
        export_run(str(runs / "mine"), "elsewhere", step)


@pytest.mark.parametrize(
    ("name", "step", "said"),
    [
        ("yours", "newest", "there is no run 'yours' in .*There are: mine"),
        ("mine", "3", "no checkpoint of step '3'. There are: 2, 4"),
        ("mine", "x", "no checkpoint of step 'x'"),
    ],
)
def test_an_unknown_run_or_step_is_an_error_that_names_what_there_is(run, name, step, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        export_run(name, str(run[0]), step, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_error_is_one_message_and_code_2(run):
    done = asyncrl("export", "mine", "--step", "3", "--dir", run[0])
    assert (done.code, done.out) == (2, "")
    assert done.err == "asyncrl: run 'mine' has no checkpoint of step '3'. There are: 2, 4\n"


def test_an_altered_checkpoint_is_not_exported(run, tmp_path):
    path = run[0] / "mine" / "checkpoints" / f"step-{STEP:08d}" / "rank-00000.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="torn or altered"):
        export_run("mine", str(run[0]), str(STEP), tmp_path / "out")
    path.write_bytes(data)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_vllm_answers_from_the_export_as_transformers_does(tmp_path):
    from transformers import AutoModelForCausalLM

    write_run(tmp_path / "runs" / "mine", save_model(tmp_path / "model", "qwen3"), "float32")
    folder = export_run("mine", str(tmp_path / "runs"), "newest")
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(folder), json.dumps(PROMPT)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tokens ")]
    tokens = torch.tensor([PROMPT])
    model = AutoModelForCausalLM.from_pretrained(folder)
    for _ in range(8):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    assert json.loads(line.removeprefix("tokens ")) == tokens[0, len(PROMPT) :].tolist()
