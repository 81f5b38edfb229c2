"""Bad input to `asyncrl plan` and `asyncrl up`: one message with its place, exit code 2, nothing started."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.planner.plan.model_folder import SIZES, write_model_folder

PROCESS = Path(__file__).with_name("refused_process.py")
BASE = """\
run: {name: refused, dir: runs}
model:
  path: model
data: {train: train.jsonl}
reward: {fn: gsm8k}
rollout: {replicas: 1, cpus: 0, max_tokens: 16}
learner: {cpus: 0}
"""


@dataclass(frozen=True)
class Row:
    """What a user got wrong: an option, or the whole text of a file of that name; and words of the answer."""

    option: str
    said: tuple[str, ...]
    text: str = ""

    @property
    def file(self) -> str:
        return f"{self.option}.yaml"

    @property
    def words(self) -> list[str]:
        return [self.file] if self.text else ["base.yaml", "--set", self.option]


ROWS = {
    "advantage": Row("algorithm.advantage=grop", ("algorithm.advantage: 'grop'", "Did you mean 'grpo'")),
    "loss": Row("algorithm.loss=nope", ("algorithm.loss: 'nope' is not known", "Known: vanilla, gspo")),
    "correction": Row("algorithm.correction=nope", ("algorithm.correction: 'nope' is not known",)),
    "rejection": Row(
        "algorithm={rejection: {nope: 1}, correction: disabled}",
        ("algorithm.rejection: 'nope' is not known",),
    ),
    "value without effect": Row("algorithm.gamma=0.5", ("algorithm.gamma does nothing with grpo",)),
    "advantage of a file": Row("algorithm.advantage=mine.py:f", ("Write mine:f, with its folder on",)),
    "advantage of no module": Row("algorithm.advantage=not_there:f", ("there is no module 'not_there'",)),
    "advantage of no function": Row("algorithm.advantage=rewards:f", ("defines no function 'f'",)),
    "reward": Row("reward.fn=gsm9k", ("reward.fn: there is no reward 'gsm9k'. Did you mean 'gsm8k'",)),
    "reward without function": Row("reward.fn=rewards.py", ("Name the function too: rewards.py:FUNCTION",)),
    "reward of no file": Row("reward.fn=nowhere.py:score", ("reward.fn: there is no file 'nowhere.py'",)),
    "reward of no function": Row("reward.fn=rewards.py:nope", ("defines no function 'nope'",)),
    "reward that asks for more": Row(
        "reward.fn=rewards.py:asks", ("'asks' cannot be called: missing a required argument: 'judge'",)
    ),
    "reward of one parameter": Row("reward.fn=rewards.py:one", ("'one' cannot be called: too many pos",)),
    "argument of a reward of a file": Row(
        "reward.fn={fn: rewards.py:score, colour: red}", ("'score' takes no argument 'colour'",)
    ),
    "reward that returns nothing": Row("reward.fn=rewards.py:silent", ("'silent' returns no number",)),
    "argument of a reward": Row("reward.fn={fn: gsm8k, colour: red}", ("takes no argument 'colour'",)),
    "pattern": Row('reward.fn={fn: format, pattern: "("}', ("is no regular expression: missing )",)),
    "two rewards of one name": Row("reward.fn=[gsm8k, gsm8k]", ("two rewards are called 'gsm8k'",)),
    "reward model": Row("reward.fn={fn: model, path: nowhere}", ("'nowhere' holds no Hugging Face model",)),
    "environment": Row("rollout.environment=nope", ("there is no environment 'nope'", "gymnasium, tools")),
    "environment of no file": Row("rollout.environment=no.py:E", ("there is no file 'no.py'",)),
    "environment without a step": Row("rollout.environment=envs.py:Idle", ("has no step",)),
    "environment of nothing": Row("rollout.environment=envs.py:Bare", ("has no start, step, score, close",)),
    "environment that is not async": Row("rollout.environment=envs.py:Plain", ("step must be `async def`",)),
    "argument of an environment of a file": Row(
        "rollout.environment={name: envs.py:Good, y: 1}", ("cannot be made: got an unexpected keyword arg",)
    ),
    "tool": Row("rollout.environment={name: tools, tools: [calculater]}", ("Did you mean 'calculator'",)),
    "argument of an environment": Row("rollout.environment={name: tools, x: 1}", ("'x'", "It takes tools")),
    "no prompt fits": Row(
        "data={train: train.jsonl, max_prompt_tokens: 1}",
        ("none of its 3 prompts fits into 1 tokens", "Raise data.max_prompt_tokens"),
    ),
    "no data": Row("data.train=absent.jsonl", ("data.train: absent.jsonl does not exist",)),
    "empty data": Row("data.train=empty.jsonl", ("holds no prompt: the file is empty",)),
    "no prompt in a row": Row("data.train=columns.jsonl", ("row 1: no 'prompt' among ['text']",)),
    "no answer in a row": Row("data.train=unanswered.jsonl", ("row 0: no 'reward_model.ground_truth'",)),
    "chats without a template": Row("data.train=chats.jsonl", ("row 0: it is a chat", "no chat template")),
    "order": Row(
        "data={train: train.jsonl, order: extra_info.levl}",
        ("data.order: train.jsonl, row 0: the key 'extra_info.levl' is None",),
    ),
    "filter": Row("data.train=[{path: train.jsonl, filter: uniq}]", ("there is no filter 'uniq'",)),
    "no model": Row("model.path=nowhere", ("model.path: 'nowhere' holds no Hugging Face model",)),
    "no weights": Row("model.path=without_weights", ("holds no weights", "save the model as safetensors")),
    "torn weights": Row("model.path=torn", ("bytes, and its header tells of", "copy it again")),
    "garbled weights": Row("model.path=garbled", ("is not a safetensors file, or cut short at 5 bytes",)),
    "missing shard": Row("model.path=without_shard", ("lacks model-2.safetensors of its weights",)),
    "shard without a tensor": Row(
        "model.path=hollow_shard", ("model-2.safetensors' lacks 'b', which model.safetensors.index.json",)
    ),
    "norm alone": Row("model.path=norm", ("norm' has no tensor 'model.embed_tokens.weight'",)),
    "no head": Row("model.path=headless", ("headless' has no tensor 'lm_head.weight'",)),
    "no second layer": Row("model.path=one_layer", ("no tensor 'model.layers.1.self_attn.q_proj.weight'",)),
    "another vocabulary": Row(
        "model.path=padded", ("'model.embed_tokens.weight' has the shape [128, 64], and [144, 64]",)
    ),
    "no tokenizer": Row("model.path=without_tokenizer", ("holds no tokenizer (no tokenizer.json)",)),
    "torn tokenizer": Row("model.path=torn_tokenizer", ("is not a tokenizer: key must be a string",)),
    "empty tokenizer": Row("model.path=empty_tokenizer", ("is not a tokenizer: data did not match",)),
    "large tokenizer": Row("model.path=small", ("knows 50 tokens (vocab_size), and its tokenizer has",)),
    "head size": Row("model.path=narrow", ("no attention for heads of 16, only of 32,", "rollout.gpus: 1")),
    "long rows": Row(
        "rollout={max_tokens: 4000, replicas: 1, cpus: 0}",
        ("rollout.max_tokens = 4512 tokens, and the model knows 4096 positions",),
    ),
    "small cache": Row(
        "rollout={max_tokens: 3000, kv_cache_bytes: 1048576, replicas: 1, cpus: 0}",
        ("rollout.kv_cache_bytes: 1048576 do not hold one row of", "3512 tokens x 512 bytes = 1798144"),
    ),
    "run.dir below a file": Row("run.dir=train.jsonl/x", ("run.dir: '", "train.jsonl' is a file")),
    "run.dir over a file": Row("run.dir=/root/../etc/passwd", ("passwd' is a file",)),
    "run.dir that takes nothing": Row("run.dir=/proc/x", ("nothing can be written into '/proc'",)),
    "too few GPUs": Row(
        "rollout={gpus: 2, replicas: 8, cpus: 0, max_tokens: 16}", ("ask for 16 GPUs", "set both to 0")
    ),
    "too few CPUs": Row("rollout.cpus=5000", ("CPUs", "this machine has")),
    "memory": Row("rollout.replicas=10000", ("rollout.replicas: the run takes",)),
    "Redis that is away": Row(
        "buffer={journal: redis, url: 'redis://127.0.0.1:1/0'}",
        ("buffer.url: Redis at redis://127.0.0.1:1/0 cannot be reached:", "refused", "start it, or check"),
    ),
    "variable of a Redis": Row(
        "buffer={journal: redis, url: '${NOPE_URL}'}", ("the environment has no variable NOPE_URL",)
    ),
    "learning rate": Row("learner.lr=1e9", ("learner.lr is 1000000000.0, but must be 1.0 or less",)),
    "critic without an advantage": Row("critic.lr=1e-5", ("critic is set, but algorithm.advantage: grpo",)),
    "kl_coef": Row("algorithm.kl_coef=0.1", ("unknown key 'kl_coef'", "Write kl: {coef: ...}")),
    "no equals sign": Row("learner.steps", ("an option has the form key=value",)),
    "verl": Row(
        "actor_rollout_ref={actor: {optim: {lr: 1}}, rollout: {n: 4}}",
        (
            "It is verl's",
            "docs/from-verl.md",
            "actor.optim.lr -> learner.lr, rollout.n -> rollout.group_size",
        ),
    ),
    "verl's section": Row("trainer={x: 1}", ("unknown section 'trainer'. It is verl's: docs/from-verl.md",)),
    "verl's key": Row("algorithm.adv_estimator=gae", ("here it is algorithm.advantage (docs/from-verl.md)",)),
    "brackets 5,000 deep": Row(
        "list", ("list.yaml:1:16: values are nested deeper than 8 levels",), "model: " + "[" * 5000
    ),
    "maps 5,000 deep": Row(
        "map", ("map.yaml:1:", "values are nested deeper than 8 levels"), "model: " + "{a: " * 5000
    ),
    "option 5,000 deep": Row("model.path=" + "[" * 5000, ("values are nested deeper than 8 levels",)),
}

KEPT: dict[str, Callable[[str], bool]] = {
    "norm": lambda tensor: tensor == "model.norm.weight",
    "headless": lambda tensor: tensor != "lm_head.weight",
    "one_layer": lambda tensor: ".layers.1." not in tensor,
}
"""Folders whose weights are those of the good model, and which tensors are kept."""

REWARDS = """\
import not_installed

def score(response, ground_truth):
    return 1.0

def asks(response, ground_truth, judge):
    return 1.0

def one(response):
    return 1.0

def silent(response, ground_truth, **extra):
    def inner():
        return 1.0
    print(inner())
"""
ENVIRONMENTS = """\
from rollout_service.environments import Environment
import not_installed

class Good(Environment):
    def __init__(self, prompt, seed, x=1): ...
    async def step(self, answer): ...

class Idle(Environment):
    async def start(self): ...

class Bare: ...

class Plain(Environment):
    def step(self, answer): ...
"""


def write_folder(folder: Path) -> None:
    """Write everything that the rows name."""
    (folder / "base.yaml").write_text(BASE)
    for row in ROWS.values():
        if row.text:
            (folder / row.file).write_text(row.text)
    prompts = "".join(json.dumps({"prompt": f"{i}+{i}=", "ground_truth": "2"}) + "\n" for i in range(3))
    (folder / "train.jsonl").write_text(prompts)
    (folder / "empty.jsonl").write_text("")
    (folder / "columns.jsonl").write_text(prompts.splitlines()[0] + '\n{"text": "a"}\n')
    (folder / "unanswered.jsonl").write_text('{"prompt": "1"}\n')
    chat = {"prompt": [{"role": "user", "content": "1+1="}], "ground_truth": "2"}
    (folder / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "envs.py").write_text(ENVIRONMENTS)
    write_model_folder(folder / "model", **SIZES)
    (write_model_folder(folder / "without_weights", **SIZES) / "model.safetensors").unlink()
    torn = write_model_folder(folder / "torn", **SIZES) / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-4])
    (write_model_folder(folder / "garbled", **SIZES) / "model.safetensors").write_bytes(b"short")
    for name in ("without_shard", "hollow_shard"):
        sharded = write_model_folder(folder / name, **SIZES)
        files = {"a": "model.safetensors", "b": "model-2.safetensors"}
        (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        save_file({"a": np.zeros(4, np.float32)}, sharded / "model.safetensors")
    save_file({"c": np.zeros(4, np.float32)}, sharded / "model-2.safetensors")
    for name, kept in KEPT.items():
        file = write_model_folder(folder / name, **SIZES) / "model.safetensors"
        save_file({tensor: value for tensor, value in load_file(file).items() if kept(tensor)}, file)
    padded = write_model_folder(folder / "padded", **SIZES)
    (padded / "config.json").write_text(json.dumps({"model_type": "qwen3"} | SIZES | {"vocab_size": 144}))
    (write_model_folder(folder / "without_tokenizer", **SIZES) / "tokenizer.json").unlink()
    for name, text in (("torn_tokenizer", "{not json"), ("empty_tokenizer", '{"model": {}}')):
        (write_model_folder(folder / name, **SIZES) / "tokenizer.json").write_text(text)
    write_model_folder(folder / "small", **SIZES | {"vocab_size": 50})
    write_model_folder(folder / "narrow", **SIZES | {"head_dim": 16})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    write_folder(folder)
    return folder


def call_all(folder: Path, calls: list[list[str]]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROCESS), str(folder)],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    calls = [[verb, *row.words] for row in ROWS.values() for verb in ("plan", "up")]
    found = call_all(folder, [["plan", "base.yaml"], *calls])
    good, *rest = found["calls"]
    assert good["code"] == 0, f"the base of every row is right: {good['err']}"
    names = [(name, verb) for name in ROWS for verb in ("plan", "up")]
    return {"heavy": found["heavy"], **dict(zip(names, rest, strict=True))}


@pytest.mark.parametrize("verb", ["plan", "up"])
@pytest.mark.parametrize("name", ROWS)
def test_bad_input_is_one_message_and_code_2_and_starts_no_process(
    answers: dict[str, Any], folder: Path, name: str, verb: str
) -> None:
    done = answers[name, verb]
    lines = [line for line in done["err"].splitlines() if "checking the configuration" not in line]
    assert (done["code"], done["out"], done["started"]) == (2, "", []), done["err"]
    assert len(lines) == 1, done["err"]
    for part in ROWS[name].said:
        assert part in lines[0]
    assert "Traceback" not in done["err"]
    where = f"{ROWS[name].file}:1:" if ROWS[name].text else f"--set {ROWS[name].option.partition('=')[0]}"
    assert lines[0].startswith(where), "the place where it was written"
    assert not (folder / "runs").exists(), "nothing was made"


def test_a_refusal_loads_no_framework(answers: dict[str, Any]) -> None:
    assert answers["heavy"] == []


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("key", "offset"), [("launcher.api_port", 0), ("rollout.gateway.port", 0), ("rollout.gateway.port", 1)]
)
def test_a_port_in_use_is_one_message_and_code_2(folder: Path, taken: int, key: str, offset: int) -> None:
    """The gateways of replicas listen on the ports after the first one."""
    options = ["--set", f"{key}={taken - offset}", "--set", "rollout.replicas=2"]
    found = call_all(folder, [[verb, "base.yaml", *options] for verb in ("plan", "up")])
    for done in found["calls"]:
        # Another program may have the port beside it: then both are named.
        assert done["code"] == 2 and re.search(rf"ports? .*\b{taken}\b.* in use", done["err"])
        assert f"--set {key}={taken - offset}: " in done["err"], "its place"
        assert "Traceback" not in done["err"] and done["started"] == []
    assert not (folder / "runs").exists()


def test_problems_of_the_file_and_of_what_it_names_come_all_at_once(folder: Path) -> None:
    words = ["up", "base.yaml", "--set", "model.path=nowhere", "--set", "data.train=absent.jsonl"]
    (done,) = call_all(folder, [[*words, "--set", "algorithm.loss=nope", "--set", "reward.fn=nope"]])["calls"]
    assert done["code"] == 2
    for key in ("model.path", "data.train", "algorithm.loss", "reward.fn"):
        assert key in done["err"]
