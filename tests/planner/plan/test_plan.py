"""Checks before the start of a run: every problem at once, each with its key and a remedy."""

from __future__ import annotations

import inspect
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import engine_facts
from asyncrl.planner import plan
from asyncrl.planner.calibration import base_rates, taken_with
from asyncrl.planner.plan import checks, derived, machine, prepare
from asyncrl.planner.plan.footprint import memory, shared_memory
from asyncrl.planner.setting import Setting
from rollout_service.engine.protocol import engine_variant
from tests.planner.plan.model_folder import write_model_folder
from weight_sync.composition import build_publisher


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    """A configuration whose files exist."""
    model = write_model_folder(tmp_path / "model")
    save_file({}, model / "model.safetensors")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    return {
        "model": {"path": str(model)},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"fn": "gsm8k"},
        "rollout": {"replicas": 1},
    }


def problems_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan.check(Config(**values))
    return str(caught.value).splitlines()


def test_a_good_configuration_has_a_plan(good: dict[str, Any]) -> None:
    found = plan.check(Config(**good))
    assert (found.num_gpus, found.num_cpus, found.weight_sync.backend) == (0, 1.25, "gloo")


@pytest.mark.parametrize(
    ("changes", "chosen", "why"),
    [
        ({}, "on", "auto, within one version"),
        ({"staleness": {"max_lag": 0}}, "off", "staleness.max_lag 0: last digits"),
        ({"run": {"record": True}}, "off", "run.record: last digits"),
        ({"rollout": {"prefix_caching": False}}, "off", "rollout.prefix_caching says so"),
        ({"rollout": {"prefix_caching": True}, "staleness": {"max_lag": 0}}, "on", "says so"),
        (
            {"rollout": {"engine": "scripted", "prefix_caching": True}},
            "off",
            "the scripted engine shares no prefixes",
        ),
        ({"rollout": {"engine": "sglang", "prefix_caching": True}}, "off", "SGLang shares no prefixes"),
    ],
)
def test_prompts_share_their_cache_unless_answers_are_to_be_equal_to_the_bit(
    changes: dict[str, Any], chosen: str, why: str
) -> None:
    assert_prefix_caching({**GOOD, **changes}, chosen, why)


def test_the_deterministic_mode_of_vllm_shares_no_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert_prefix_caching(GOOD, "off", "VLLM_BATCH_INVARIANT: last digits")


def test_an_engine_whose_log_probs_are_not_equal_to_the_bit_says_so() -> None:
    for engine, wanted in (("vllm", []), ("sglang", ["within 1e-05"])):
        found = derived.derive(Config(**GOOD, rollout={"engine": engine}))
        assert [one.value for one in found if one.name == "log-probs"] == wanted


def test_a_plan_of_several_engines_has_each_with_what_holds_for_it_alone() -> None:
    config = Config(**GOOD, rollout={"engine": ["vllm", "sglang", "sglang"], "replicas": 2})
    found = {one.name: one.value for one in derived.derive(config)}
    assert found["engines"] == "vllm, sglang, sglang"
    assert (found["prefix caching of vllm"], found["prefix caching of sglang"]) == ("on", "off")
    assert found["log-probs of sglang"] == "within 1e-05" and "log-probs of vllm" not in found

    def cores(replicas: int) -> int:
        parts = memory.count_parts(config, 0, replicas)
        return next(part.num_bytes for part in parts if part.what == memory.ENGINE_CORES)

    vllm, sglang = (engine_facts(name).core_bytes for name in ("vllm", "sglang"))
    caches = config.rollout.kv_cache_bytes
    assert [cores(count) for count in (1, 2, 4)] == [
        vllm + caches,
        vllm + sglang + 2 * caches,
        2 * vllm + 2 * sglang + 4 * caches,
    ]
    (elsewhere,) = [
        part for part in memory.count_replica_elsewhere(config, 0) if part.what == memory.ENGINE_CORES
    ]
    assert elsewhere.num_bytes == sglang + caches, "whichever it is"


def test_rates_of_a_mix_are_known_only_if_those_of_all_its_engines_are() -> None:
    def most(engine: Any) -> int:
        return Setting.of(Config(**GOOD, rollout={"engine": engine})).max_sequences

    assert most(["scripted", "vllm"]) == most("vllm") < most("scripted")
    for engine, is_known in (("scripted", True), (["scripted", "vllm"], False)):
        rates = base_rates(Config(**GOOD, rollout={"engine": engine}))
        assert (rates.decode[0] == (1.0, 200.0)) == is_known
    config = Config(**GOOD, rollout={"engine": ["scripted", "vllm"]})
    assert taken_with(config)["rollout.engine"] == "scripted, vllm"


GOOD: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}


def assert_prefix_caching(values: dict[str, Any], chosen: str, why: str) -> None:
    """The plan says it, and the engine is given it."""
    config = Config(**values)
    (told,) = [one for one in derived.derive(config) if one.name == "prefix caching"]
    assert told.value == chosen and why in told.rule
    if config.rollout.engine == "vllm":
        engine: Any = engine_variant("vllm").build(config, None)  # type: ignore[arg-type]
        assert engine._settings.caches_prefixes == (chosen == "on")


@pytest.mark.parametrize(
    ("gpus", "kv_cache", "num"), [(1, "recompute", 1), (1, "keep", 0), (0, "recompute", 0)]
)
def test_on_gpus_a_plan_says_what_recomputing_the_cache_may_take(gpus: int, kv_cache: str, num: int) -> None:
    sizes = {"max_sequences": 100, "max_tokens": 900, "gpus": gpus, "kv_cache": kv_cache}
    config = Config(**{**GOOD, "data": {"train": "t", "max_prompt_tokens": 100}, "rollout": sizes})
    told = [note for note in checks.find_notes(config) if note.startswith("rollout.kv_cache recompute")]
    assert len(told) == num and all("up to 100,000 tokens" in note for note in told)


@pytest.mark.parametrize(
    ("learner", "seconds"),
    [
        ({"gpus": 1}, "20"),
        ({"gpus": 1, "cpus": 4, "dp": 2}, "2.6"),
        ({"gpus": 0}, ""),
        ({"offload": False}, ""),
    ],
)
def test_a_plan_says_how_long_adamw_takes_on_the_host(learner: dict[str, Any], seconds: str) -> None:
    config = Config(**{**GOOD, "model": {"path": "Qwen/Qwen3-8B"}, "learner": {"offload": True} | learner})
    told = [note for note in checks.find_notes(config) if note.startswith("learner.offload")]
    assert [f"about {seconds} s an update" in note for note in told] == [True] * bool(seconds)


@pytest.mark.parametrize(
    ("dtype", "section", "loads", "num_bytes"),
    [
        ("bfloat16", {}, 1, (3 + 2) * 2 * 1_500_000),
        ("float32", {"parallelism": 9}, 4, (3 + 8) * 4 * 1_500_000),
        ("float32", {"parallelism": 9, "max_unavailable": 0.5}, 2, (3 + 4) * 4 * 1_500_000),
        ("bfloat16", {"encoding": "delta", "parallelism": 2}, 2, (4 + 4) * 2 * 1_500_000),
    ],
)
def test_the_shared_memory_of_versions_on_their_way_is_counted(
    good: dict[str, Any], dtype: str, section: dict[str, Any], loads: int, num_bytes: int
) -> None:
    """Replicas of one host share the publisher's copy."""
    good["model"]["dtype"], good["weight_sync"] = dtype, section
    good["rollout"] |= {"replicas": 4, "cpus": 0}
    folder = Path(good["model"]["path"])
    files = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"a": np.zeros((1000, 1000), np.float16)}, folder / "model.safetensors")
    save_file({"b": np.zeros(500_000, np.float16), "c": np.zeros((0, 4))}, folder / "model-2.safetensors")
    need = plan.check(Config(**good)).shared_memory
    assert need is not None and need.num_bytes == num_bytes
    told, warning = need.describe(num_bytes), need.describe(num_bytes - 1)
    assert f"for each of {loads} replicas that load at once) x 0.00" in told and "warning" not in told
    assert warning.startswith("warning: ") and "enlarge it" in warning


@pytest.mark.parametrize(("ray", "num_versions"), [("local", 3 + 2), ("auto", 3)])
def test_a_plan_shows_the_most_that_versions_take_here(
    good: dict[str, Any], ray: str, num_versions: int
) -> None:
    save_file({"a": np.zeros(1000, np.float16)}, Path(good["model"]["path"]) / "model.safetensors")
    good["rollout"] = {"replicas": {"min": 1, "max": 5}, "standby": 1, "cpus": 0}
    good["launcher"] = {"ray": ray}
    found = plan.check(Config(**good))
    assert found.shared_memory is not None and found.shared_memory.num_versions == num_versions
    (part,) = [part for part in found.memory if part.where == "/dev/shm"]
    assert part.num_bytes == found.shared_memory.num_bytes


@pytest.mark.parametrize(("encoding", "num_at_receiver"), [("full", 2), ("delta", 3)])
def test_on_a_cluster_this_machine_is_counted_without_replicas_and_a_replica_by_itself(
    good: dict[str, Any], encoding: str, num_at_receiver: int
) -> None:
    save_file({"a": np.zeros(1000, np.float16)}, Path(good["model"]["path"]) / "model.safetensors")
    good["rollout"] |= {"replicas": 4, "cpus": 0, "kv_cache_bytes": 10**9}
    good["weight_sync"] = {"encoding": encoding}

    def sums(ray: str) -> dict[str, int]:
        parts = plan.check(Config(**good, launcher={"ray": ray})).memory
        places = {part.where for part in parts}
        return {where: sum(part.num_bytes for part in parts if part.where == where) for where in places}

    here, cluster = sums("local"), sums("auto")
    host, shm = "host, for each replica", "/dev/shm, for each replica"
    assert set(cluster) - set(here) == {host, shm}
    assert cluster[host] > 10**9 and cluster[shm] == num_at_receiver * 2 * 1000
    assert here["host"] == cluster["host"] + 4 * cluster[host]
    at_publisher = cluster["/dev/shm"]
    assert here["/dev/shm"] == at_publisher + 2 * 2 * 1000, "the replicas here share the publisher's copy"


def test_on_a_cluster_this_machine_is_counted_with_the_ranks_that_it_holds(
    good: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": np.zeros(1000, np.float16)}, Path(good["model"]["path"]) / "model.safetensors")
    good["learner"] = good.get("learner", {}) | {"dp": 5, "cpus": 1.5}
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    with pytest.raises(ConfigError, match=r"ask for 7\.5 CPUs, this machine has 4"):
        plan.check(Config(**good | {"rollout": good["rollout"] | {"cpus": 0}}))
    good["rollout"] |= {"cpus": 0}
    found = plan.check(Config(**good, launcher={"ray": "auto"}))
    learners = [(one.count, one.cpus, one.where) for one in found.placement if one.kind == "learner"]
    assert learners == [(2, 3.0, "this machine"), (3, 4.5, "other nodes of the Ray cluster")]
    sums = {(part.where, part.what): part.num_bytes for part in found.memory}
    elsewhere = "host, for each learner rank elsewhere"
    processes, copy = "learner processes", "copy of the policy for a checkpoint"
    assert sums["host", processes] == 2 * sums[elsewhere, processes] > 0
    assert sums["host", copy] == 2 * sums[elsewhere, copy] == 2 * 12 * 1000 // 5
    shares = [
        sums[where, "versions on their way"]
        for where in ("/dev/shm", "/dev/shm, for each other learner node")
    ]
    assert shares == [3 * 2 * 1000 // 3] * 2, "5 ranks take 3 machines of 2, each with a publisher"
    assert found.shared_memory is not None and found.shared_memory.num_bytes == shares[0]
    assert "3 at the publisher, 1/3 of each x" in found.shared_memory.rule
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 1)
    assert machine.count_ranks_here(Config(**good, launcher={"ray": "auto"})) == 5, "it is not this machine"


def test_the_gpus_of_a_replica_elsewhere_are_counted_too(good: dict[str, Any]) -> None:
    save_file({"a": np.zeros(1000, np.float16)}, Path(good["model"]["path"]) / "model.safetensors")
    config = Config(**good, launcher={"ray": "auto"})
    on_gpu = config.model_copy(update={"rollout": config.rollout.model_copy(update={"gpus": 2})})
    found = [part for part in checks.count_nodes(on_gpu) if part.what == "engine"]
    assert [(part.where, part.num_bytes) for part in found] == [("each GPU of a replica", 1000)]


def test_a_model_whose_size_cannot_be_told_counts_for_nothing(good: dict[str, Any]) -> None:
    file = Path(good["model"]["path"], "model.safetensors")
    zeros = 7 * b"\0"
    for data in (b"", b"1234567", b"\xff" * 20, b"\x02" + zeros + b"[]", b"\x08" + zeros + b'{"a": 1}'):
        file.write_bytes(data)
        assert shared_memory.count(Config(**good), 1) is None
        (line,) = problems_of(good)
        assert line.startswith(
            f"model.path: '{file}' is not a safetensors file, or cut short at {len(data)} "
        )
    assert shared_memory.free_bytes() > 0


def test_weight_sync_keeps_as_many_versions_as_are_counted() -> None:
    default = inspect.signature(build_publisher).parameters["num_segments"].default
    assert default == shared_memory.NUM_AT_PUBLISHER


def test_all_problems_are_told_at_once(good: dict[str, Any]) -> None:
    good["model"]["path"] = "models/nowhere/at/all"
    good["data"]["train"] = "nothing.parquet"
    good["reward"]["fn"] = "nowhere.py:score"
    good["rollout"]["gpus"] = 99
    keys = [line.split(":")[0] for line in problems_of(good)]
    assert keys[:3] == ["model.path", "data.train", "reward.fn"]
    assert "ask for 99 GPUs" in problems_of(good)[3]


def test_a_model_of_an_unsupported_architecture_is_named(good: dict[str, Any]) -> None:
    Path(good["model"]["path"], "config.json").write_text('{"model_type": "gpt_oss"}')
    (line,) = problems_of(good)
    assert "'gpt_oss'" in line and ", or any other model with" in line


def test_fsdp2_takes_any_architecture(good: dict[str, Any]) -> None:
    Path(good["model"]["path"], "config.json").write_text('{"model_type": "gpt2"}')
    assert plan.check(Config(**good, learner={"backend": "fsdp2"})).num_processes > 0


@pytest.mark.parametrize(
    ("learner", "said"),
    [
        ({"tp": 2}, []),
        ({"pp": 2, "vpp": 2, "cpus": 0}, []),
        ({"tp": 4}, ["learner.tp: 4 does not divide the model's 2 key/value heads"]),
        ({"pp": 3}, ["learner.pp x vpp: 3 does not divide the model's 4 layers"]),
        ({"vpp": 2}, ["learner.vpp: 2 cuts pipeline stages, but learner.pp is 1"]),
        ({"tp": 2, "pp": 8}, ["learner.pp x vpp: 8 does not divide the model's 4 layers"]),
        ({"dp": 2, "ep": 2}, []),
        ({"dp": 4, "ep": 4}, ["learner.ep: 4 does not divide the model's experts: 6"]),
    ],
)
def test_a_model_that_cannot_be_cut_evenly_is_refused_before_anything_starts(
    good: dict[str, Any], learner: dict[str, int], said: list[str]
) -> None:
    sizes = {"num_hidden_layers": 4, "intermediate_size": 128, "vocab_size": 130, "num_key_value_heads": 2}
    table = {"model_type": "qwen3", "num_attention_heads": 4} | sizes
    if "ep" in learner:
        table |= {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
    Path(good["model"]["path"], "config.json").write_text(json.dumps(table))
    good["learner"] = {"cpus": 0} | learner
    if not said:
        plan.check(Config(**good))
        return
    assert [line.split(";")[0] for line in problems_of(good)] == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 8}, "num_experts: 8: these experts are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window: True is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
    ],
)
def test_what_the_learner_would_refuse_of_a_model_is_refused_before_anything_starts(
    good: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    Path(good["model"]["path"], "config.json").write_text(json.dumps({"model_type": "qwen3"} | changes))
    (line,) = problems_of(good)
    assert line.startswith("model.path") and said in line


@pytest.fixture
def with_critic(good: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A configuration of PPO whose critic is a model of its own."""
    critic = write_model_folder(tmp_path / "critic", vocab_size=100)
    return good | {"critic": {"path": str(critic)}, "algorithm": {"advantage": "gae"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no Hugging Face model"),
        ("{not json", "cannot be read"),
        ('{"model_type": "gpt_oss"}', "'gpt_oss' is not supported"),
        ('{"model_type": "qwen3", "vocab_size": 50}', "knows 50 tokens (vocab_size), and the policy's"),
    ],
)
def test_the_critics_model_is_checked_as_the_policys_is(
    with_critic: dict[str, Any], text: str | None, said: str
) -> None:
    Path(with_critic["model"]["path"], "config.json").write_text('{"model_type": "qwen3", "vocab_size": 100}')
    plan.check(Config(**with_critic))
    file = Path(with_critic["critic"]["path"], "config.json")
    file.unlink() if text is None else file.write_text(text)
    (line,) = problems_of(with_critic)
    assert line.startswith("critic.path") and said in line


def write_tokenizer(folder: str, model: models.Model, **added: int) -> None:
    """Write a tokenizer with these added tokens, of which those of images are special."""
    file = Path(folder, "tokenizer.json")
    Tokenizer(model).save(str(file))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [
        {"content": name, "id": number, "special": name == "image"} | flags for name, number in added.items()
    ]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens": tokens}))


@pytest.mark.parametrize(
    "vocabulary",
    [
        models.BPE({f"t{index}": index for index in range(89)}, []),
        models.Unigram([(f"t{index}", -1.0) for index in range(89)], 0, False),
    ],
    ids=["bpe", "unigram"],
)
@pytest.mark.parametrize(
    ("policy", "critic", "refused"),
    [(100, 92, None), (92, 100, None), (90, 90, None), (92, 89, "critic.path"), (89, 92, "model.path")],
)
def test_both_models_must_know_the_tokenizers_ids_however_far_their_configs_are_padded(
    with_critic: dict[str, Any], vocabulary: models.Model, policy: int, critic: int, refused: str | None
) -> None:
    sizes = {with_critic["model"]["path"]: policy, with_critic["critic"]["path"]: critic}
    for folder, size in sizes.items():
        table = {"model_type": "qwen3", "vocab_size": size}
        Path(folder, "config.json").write_text(json.dumps(table))
    write_tokenizer(with_critic["model"]["path"], vocabulary, more=89, image=100)
    if refused is None:
        plan.check(Config(**with_critic))
        return
    (line,) = problems_of(with_critic)
    assert line.startswith(f"{refused}:") and "knows 89 tokens" in line and "has ids up to 89;" in line


def test_a_tokenizer_of_other_files_leaves_the_policys_size_to_compare_with(
    with_critic: dict[str, Any],
) -> None:
    model = Path(with_critic["model"]["path"])
    (model / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 101}')
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    (line,) = problems_of(with_critic)
    assert line.startswith("critic.path") and "knows 100 tokens" in line


def test_a_critic_that_cannot_be_cut_as_the_policy_is_refused(with_critic: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 3, "intermediate_size": 128, "vocab_size": 128, "num_key_value_heads": 2}
    Path(with_critic["critic"]["path"], "config.json").write_text(json.dumps({"model_type": "qwen3"} | sizes))
    (line,) = problems_of(with_critic | {"learner": {"pp": 2, "cpus": 0}})
    assert "2 does not divide the model's 3 layers" in line


def test_the_critics_model_is_prepared_as_the_policys_is(
    with_critic: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with_critic["critic"]["path"] = "critic"
    prepared = prepare.prepare(Config(**with_critic), print)
    assert prepared.critic.path == str(tmp_path / "critic")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with_critic["critic"]["path"] = "nobody-at-all/no-such-model"
    with pytest.raises(ConfigError, match=r"critic.path: .*could not be fetched from the hub"):
        prepare.prepare(Config(**with_critic), print)


@pytest.mark.parametrize("cp", [1, 2])
def test_a_row_must_fit_a_microbatch_however_many_ranks_share_it(good: dict[str, Any], cp: int) -> None:
    good["data"]["max_prompt_tokens"], good["rollout"]["max_tokens"] = 100, 200
    good["learner"] = {"cp": cp, "cpus": 0, "max_tokens_per_microbatch": 300}
    plan.check(Config(**good))
    good["learner"]["max_tokens_per_microbatch"] = 299
    (line,) = problems_of(good)
    assert line.startswith("learner.max_tokens_per_microbatch: 299") and "= 300" in line


@pytest.mark.parametrize("content", ["{not json", "[1, 2]"])
def test_a_damaged_model_folder_is_told_and_is_no_traceback(good: dict[str, Any], content: str) -> None:
    Path(good["model"]["path"], "config.json").write_text(content)
    (line,) = problems_of(good)
    assert line.startswith("model.path") and "cannot be read" in line


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "not json\n", "row 0: not JSON"),
        ("a.jsonl", '{"text": 1}\n', "row 0: no 'prompt' among ['text']"),
        ("a.jsonl", '{"prompt": "1"}\n', "row 0: no 'reward_model.ground_truth' and no 'ground_truth'"),
        ("a.jsonl", "", "holds no prompt: the file is empty"),
        ("a.parquet", "not parquet", "is not a readable Parquet file"),
        ("a.csv", "prompt\n1\n", "cannot read '.csv' files. Use .parquet, .jsonl"),
    ],
)
def test_unreadable_data_is_told_with_its_reason(
    good: dict[str, Any], tmp_path: Path, name: str, content: str, expected: str
) -> None:
    (tmp_path / name).write_text(content)
    good["data"]["train"] = str(tmp_path / name)
    (line,) = problems_of(good)
    assert line.startswith("data.train") and expected in line


def test_a_reward_file_without_the_function_is_refused(good: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def other(): ...\n")
    good["reward"]["fn"] = f"{tmp_path / 'mine.py'}:score"
    (line,) = problems_of(good)
    assert "defines no function 'score'" in line


def test_too_many_cpus_are_refused_with_what_there_is(good: dict[str, Any]) -> None:
    good["rollout"]["cpus"] = 10_000
    (line,) = problems_of(good)
    assert "this machine has" in line


def test_a_parser_that_is_not_known_is_refused(good: dict[str, Any]) -> None:
    good["rollout"]["gateway"] = {"tool_call_parser": "hermess"}
    (line,) = problems_of(good)
    assert line.startswith("rollout.gateway.tool_call_parser: vLLM has no 'hermess', perhaps hermes; it has ")


def test_a_port_in_use_is_refused(good: dict[str, Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        good["launcher"] = {"api_port": taken.getsockname()[1]}
        (line,) = problems_of(good)
    assert line.startswith("launcher.api_port") and "in use" in line


def test_a_hub_id_is_told_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare.is_hub_id("Qwen/Qwen3-0.6B")
    assert not prepare.is_hub_id("models/a/b")
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert not prepare.is_hub_id("models/mine")


def test_what_stands_behind_an_at_is_a_revision_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare.is_hub_id("Qwen/Qwen3-0.6B@refs/pr/3")
    assert prepare.split_revision("Qwen/Qwen3-0.6B@refs/pr/3") == ("Qwen/Qwen3-0.6B", "refs/pr/3")
    assert prepare.split_revision("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    assert not prepare.is_hub_id("Qwen/Qwen3-0.6B@") and not prepare.is_hub_id("mine@v2")
    (tmp_path / "models" / "mine@v2").mkdir(parents=True)
    assert not prepare.is_hub_id("models/mine@v2")
    values = {"model": {"path": "models/mine@v2"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
    assert prepare.prepare(Config(**values), print).model.path == str(tmp_path / "models" / "mine@v2")


def test_a_hub_id_that_cannot_be_fetched_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="could not be fetched from the hub"):
        prepare.fetch("nobody-at-all/no-such-model")


@pytest.mark.parametrize("name", ["model", "critic"])
def test_a_model_of_the_hub_is_pinned_to_the_revision_that_was_found_or_is_named(
    with_critic: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cached = tmp_path / "hub" / "models--owner--name"
    newest, older = "a" * 40, "b" * 40
    for revision in (newest, older):
        (cached / "snapshots" / revision).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(newest)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for named, found in (("", newest), (f"@{older}", older)):
        with_critic[name] = {"path": f"owner/name{named}"}
        section = getattr(prepare.prepare(Config(**with_critic), print), name)
        assert section.path == str(cached / "snapshots" / found)


def test_an_unknown_builtin_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="digit_sort"):
        prepare.make_builtin("builtin:nope", tmp_path, print)


@pytest.mark.parametrize(
    "text", ["from other import score\n", "score = max\n", "async_ = 1\ndef score(*_):\n    return 0.0\n"]
)
def test_a_reward_function_may_be_bound_in_any_way(good: dict[str, Any], tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    good["reward"]["fn"] = f"{tmp_path / 'mine.py'}:score"
    plan.check(Config(**good))


@pytest.mark.parametrize("data", [b"def score(:\n", b"\xff\xfe\x00"])
def test_a_reward_file_that_is_no_python_is_refused_in_a_sentence(
    good: dict[str, Any], tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "mine.py").write_bytes(data)
    good["reward"]["fn"] = f"{tmp_path / 'mine.py'}:score"
    with pytest.raises(ConfigError, match="is no Python file"):
        plan.check(Config(**good))


def test_each_of_several_rewards_is_checked_and_resolved(good: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(response, ground_truth, tone):\n    return 0.0\n")
    mine, judge = f"{tmp_path}/mine.py:score", "http://127.0.0.1:1/judge"
    good["reward"]["fn"] = [
        "gsm8k",
        {"fn": mine, "weight": 0.5, "tone": "calm"},
        judge,
        {"fn": "model", "path": good["model"]["path"]},
    ]
    config = Config(**good)
    assert plan.check(config).num_gpus == 0
    fns = prepare.prepare(config, print).reward.fn
    assert [part.fn for part in fns] == ["gsm8k", mine, judge, "model"]
    assert (fns[1].weight, fns[1].arguments) == (0.5, {"tone": "calm"})
    assert fns[3].arguments == {"path": good["model"]["path"]}
    good["reward"]["fn"] = ["gsm8k", {"fn": f"{tmp_path}/mine.py:judge"}]
    (line,) = problems_of(good)
    assert line.startswith("reward.fn:") and "defines no function 'judge'" in line
