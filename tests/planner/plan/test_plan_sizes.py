"""Demand of a run against the capacity: refused with the arithmetic, before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.machine.resources import count_gpus
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.models.architectures import ModelSize
from asyncrl.planner import plan
from asyncrl.planner.plan import checks
from asyncrl.planner.plan.footprint import capacity, sizes
from asyncrl.planner.plan.footprint.capacity import Capacity
from asyncrl.planner.plan.footprint.memory import HOST, LEARNER_GPU, ROLLOUT_GPU, SHM, Part, count_parts
from asyncrl.planner.plan.footprint.shared_memory import NUM_AT_PUBLISHER
from tests.planner.plan.model_folder import SIZES, write_model_folder

GB = 10**9
QWEN3_8B = ModelSize(36, 4096, 32, 8, 128, 12288, 151936)
NUM_WEIGHTS = 8_190_735_360


def make_config(**sections: Any) -> Config:
    required = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}
    return Config(**(required | sections))


def lacks(config: Config, **there: int) -> list[str]:
    return list(sizes.find_lacks(count_parts(config, NUM_WEIGHTS, 2), Capacity(**there)))


def test_what_fits_is_not_complained_of() -> None:
    config = make_config(learner={"gpus": 1, "tp": 4}, rollout={"gpus": 1})
    assert lacks(config, host=120 * GB, shm=1, gpu=80 * GB) == []
    assert lacks(config) == [], "what is not known is not held against it"


def test_a_policy_that_does_not_fit_a_gpu_is_refused_with_the_sum() -> None:
    config = make_config(learner={"gpus": 1}, rollout={"gpus": 1})
    (line,) = lacks(config, host=120 * GB, gpu=80 * GB)
    assert line == (
        "learner.gpus: the run takes 147 GB of each GPU of the learner, which has 80: policy and its "
        "optimizer 147 ((weight 2 + gradient 4 + optimizer 12 bytes) x 8.19 G weights); "
        "raise learner.tp, learner.pp or learner.dp, or set learner.offload"
    )


@pytest.mark.parametrize(
    ("learner", "num_gb"),
    [
        ({}, 147),
        ({"tp": 2}, 74),
        ({"tp": 2, "pp": 2}, 37),
        ({"dp": 4}, 74),
        ({"dp": 4, "backend": "fsdp2"}, 33),
        ({"cp": 4}, 74),
        ({"dp": 2, "cp": 2}, 74),
        ({"offload": True}, 49),
        ({"offload": True, "tp": 2, "dp": 2}, 25),
        ({"offload": True, "backend": "fsdp2", "dp": 4}, 0),
    ],
)
def test_cutting_and_offloading_make_the_share_of_a_gpu_smaller(learner: dict[str, Any], num_gb: int) -> None:
    parts = count_parts(make_config(learner={"gpus": 1} | learner), NUM_WEIGHTS, 1)
    assert round(sum(part.num_bytes for part in parts if part.where == LEARNER_GPU) / GB) == num_gb


@pytest.mark.parametrize(
    ("learner", "num_gb"),
    [
        ({"dp": 4}, 6 * 8 + 12 * 8 / 4),
        ({"dp": 4, "ep": 4}, 6 * (2 + 6 / 4) + 12 * 8 / 4),
        ({"tp": 2, "dp": 2, "ep": 4}, 6 * (2 / 2 + 6 / 4) + 12 * 8 / 4),
        ({"tp": 2, "dp": 2}, 6 * 8 / 2 + 12 * 8 / 4),
    ],
)
def test_a_rank_holds_its_share_of_the_experts_and_of_the_rest(
    learner: dict[str, Any], num_gb: float
) -> None:
    config = make_config(learner={"gpus": 1} | learner)
    parts = count_parts(config, 8 * GB, 1, expert_weights=6 * GB)
    found = sum(part.num_bytes for part in parts if part.where == LEARNER_GPU)
    assert found / GB == pytest.approx(num_gb)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_offloaded_optimizer_is_on_the_host_with_its_gradients_and_nothing_of_it_on_the_gpu(
    dtype: str,
) -> None:
    """Float32 weights and moments of 12 bytes; 4 more are the pinned memory that gradients come to."""
    model = {"path": "Qwen/Qwen3-8B", "dtype": dtype}
    config = make_config(model=model, learner={"gpus": 1, "offload": True}, rollout={"gpus": 1})
    on_gpu = [part for part in checks.count_all(config, 0, 0) if part.where == LEARNER_GPU]
    activations = sizes.estimate_activations(config, QWEN3_8B).num_bytes
    held = {"bfloat16": 2 + 4, "float32": 4 + 4}[dtype]
    assert sum(part.num_bytes for part in on_gpu) == held * NUM_WEIGHTS + activations
    (line,) = lacks(config, host=64 * GB, gpu=160 * GB)
    assert "optimizer of the policy 131 ((optimizer 12 + gradient 4 bytes) x 8.19 G weights)" in line
    assert "copy of the policy for a checkpoint 98.3 (weight and moments 12 bytes x 8.19 G weights)" in line


def test_an_offloaded_optimizer_of_a_learner_on_the_cpu_is_where_it_was() -> None:
    found = {}
    for offload in (False, True):
        parts = count_parts(make_config(learner={"offload": offload}), NUM_WEIGHTS, 1)
        found[offload] = sum(part.num_bytes for part in parts if part.where == HOST)
    assert found[True] == found[False]


@pytest.mark.parametrize("learner", [{}, {"gpus": 1, "tp": 2}, {"dp": 4, "backend": "fsdp2"}])
def test_the_copy_for_a_checkpoint_is_counted_once_however_many_ranks_share_it(
    learner: dict[str, Any],
) -> None:
    config = make_config(learner=learner, algorithm={"advantage": "gae"})
    found = {part.what: part for part in count_parts(config, 8 * GB, 1, critic_weights=2 * GB)}
    for name, num_weights in (("policy", 8 * GB), ("critic", 2 * GB)):
        part = found[f"copy of the {name} for a checkpoint"]
        assert (part.where, part.num_bytes) == (HOST, 12 * num_weights)
    assert "copy of the critic for a checkpoint" not in {
        part.what for part in count_parts(make_config(), 8 * GB, 1)
    }


def test_an_engine_that_does_not_fit_names_its_own_gpus() -> None:
    (line,) = lacks(
        make_config(rollout={"gpus": 1}, learner={"gpus": 1, "tp": 16}), host=120 * GB, gpu=16 * GB
    )
    assert line.startswith("rollout.gpus: ") and line.endswith("raise rollout.gpus")
    assert "of each GPU of a replica, which has 16" in line


def test_shared_memory_is_main_memory_too() -> None:
    parts = [Part(HOST, "buffer", 6 * GB, "r"), Part(SHM, "versions", 5 * GB, "3 x 2")]
    assert list(sizes.find_lacks(parts, Capacity(host=11 * GB, shm=5 * GB))) == []
    (host,) = sizes.find_lacks(parts, Capacity(host=11 * GB - 1, shm=5 * GB))
    assert (
        "takes 11 GB of host, which has 11: buffer 6 (r) + versions 5 (3 x 2); lower rollout.replicas" in host
    )
    (shm,) = sizes.find_lacks(parts, Capacity(host=11 * GB, shm=5 * GB - 1))
    assert shm.startswith("weight_sync.parallelism: the run takes 5 GB of /dev/shm") and "remount" in shm


def test_activations_are_estimated_and_never_a_reason_to_refuse() -> None:
    config = make_config(learner={"gpus": 1, "max_tokens_per_microbatch": 1 << 20})
    part = sizes.estimate_activations(config, QWEN3_8B)
    assert part.where == LEARNER_GPU and part.num_bytes > 80 * GB
    assert list(sizes.find_lacks([part], Capacity(gpu=GB))) == []


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1.0),
        ({"tp": 2}, 1 / 2),
        ({"cp": 4}, 1 / 4),
        ({"pp": 4}, 1 / 4),
        ({"max_tokens_per_microbatch": 8192}, 1 / 2),
        ({"recompute": "full"}, (36 * 4096 + 94208) / (36 * 94208)),
    ],
)
def test_activations_follow_the_cuts_the_budget_and_the_recomputation(
    changes: dict[str, Any], share: float
) -> None:
    def estimate(**learner: Any) -> int:
        return sizes.estimate_activations(make_config(learner={"gpus": 1} | learner), QWEN3_8B).num_bytes

    assert estimate() == 16384 * 2 * 36 * (6 * 4096 + 4 * 12288 + 4 * 40 * 128)
    assert estimate(**changes) == pytest.approx(estimate() * share, rel=1e-6)


def test_a_small_minibatch_has_fewer_tokens_than_the_budget() -> None:
    config = make_config(
        learner={"groups_per_step": 4, "minibatches": 2, "dp": 2},
        rollout={"group_size": 2, "max_tokens": 88},
        data={"train": "t", "max_prompt_tokens": 12},
    )
    assert sizes.count_tokens(config) == 1 * 2 * 100


@pytest.mark.parametrize(
    ("gpus", "kv_heads", "said"),
    [
        (1, 8, ""),
        (4, 8, ""),
        (16, 8, ""),
        (3, 8, "3 does not divide the model's 32 attention heads"),
        (8, 12, "8 neither divides the model's 12 key/value heads nor is a multiple of them"),
    ],
)
def test_an_engine_gets_whole_heads_on_each_gpu(gpus: int, kv_heads: int, said: str) -> None:
    size = replace(QWEN3_8B, num_key_value_heads=kv_heads)
    found = list(sizes.find_uneven_engine(make_config(rollout={"gpus": gpus}), size))
    assert len(found) == bool(said) and all(said in line for line in found)


def test_a_buffer_too_small_for_two_batches_is_refused_with_the_size_it_needs() -> None:
    (line,) = checks.check_buffer(make_config(buffer={"memory_bytes": 1 << 20}))
    assert line.startswith("buffer.memory_bytes: ") and "cannot hold two batches of 16 groups" in line
    needed = int(line.rpartition(" ")[2])
    assert list(checks.check_buffer(make_config(buffer={"memory_bytes": needed}))) == []
    assert list(checks.check_buffer(make_config(buffer={"memory_bytes": needed - 1}))) != []


def test_what_this_machine_has_is_read() -> None:
    found = capacity.measure()
    assert found.host is not None and found.shm is not None and found.host > GB
    assert found.gpu is None or count_gpus() > 0


def test_plan_counts_all_of_it_and_refuses_what_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n')
    write_model_folder(tmp_path, **SIZES)
    sections: dict[str, Any] = {
        "model": {"path": str(tmp_path)}, "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"fn": "gsm8k"},
    }  # fmt: skip
    parts = plan.check(Config(**sections)).memory
    assert [part.what for part in parts if part.what == sizes.ACTIVATIONS]
    with pytest.raises(ConfigError, match=r"^rollout.replicas: the run takes 1e\+06 GB of host"):
        plan.check(Config(**sections, rollout={"kv_cache_bytes": 10**15}))
    assert plan.check(Config(**sections, buffer={"memory_bytes": 10**15})), "a ceiling is not taken"


WINDOW = {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("engine", "changes", "is_refused"),
    [
        ("sglang", {}, True),
        (["vllm", "sglang"], {}, True),
        ("sglang", {"model_type": "mistral"}, True),
        ("sglang", {"sliding_window": 200}, False),
        ("sglang", {"use_sliding_window": False}, False),
        ("sglang", {"max_window_layers": 2}, False),
        ("sglang", {"model_type": "llama"}, False),
        ("vllm", {}, False),
    ],
)
def test_a_model_whose_window_its_engine_leaves_out_is_refused_before_anything_starts(
    tmp_path: Path, engine: str | list[str], changes: dict[str, Any], is_refused: bool
) -> None:
    write_model_folder(tmp_path, **{**SIZES, **WINDOW, **changes})
    config = make_config(
        model={"path": str(tmp_path)},
        data={"train": "t", "max_prompt_tokens": 100},
        reward={"fn": "gsm8k"},
        rollout={"engine": engine, "replicas": 2, "max_tokens": 100},
        learner={"backend": "fsdp2"},
    )
    if not is_refused:
        assert plan.check_elsewhere(config)
        return
    with pytest.raises(
        ConfigError, match=r"^model.path: SGLang .* without its sliding window of 128 tokens;"
    ):
        plan.check_elsewhere(config)


def write_model(folder: Path, **shapes: int) -> str:
    """Write a model folder whose files say that they hold tensors of so many weights; return its path."""
    folder.mkdir()
    entries = {
        name.replace("__", "."): {"shape": [size], "data_offsets": [0, 0]} for name, size in shapes.items()
    }
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(folder)


def counted(config: Config) -> dict[str, int]:
    return {part.what: part.num_bytes for part in checks.count_all(config, 1, 1)}


def test_a_critic_of_its_own_is_as_large_as_its_own_files_and_has_no_language_head(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", body=7 * GB, lm_head__weight=GB)
    critic = write_model(tmp_path / "critic", body=GB, lm_head__weight=GB)
    sections: dict[str, Any] = {"model": {"path": policy}, "algorithm": {"advantage": "gae"}}
    assert counted(make_config(**sections))["critic and its optimizer"] == 18 * 7 * GB
    sections["critic"] = {"path": critic}
    assert counted(make_config(**sections))["critic and its optimizer"] == 18 * GB
    assert counted(make_config(**sections))["policy and its optimizer"] == 18 * 8 * GB
    sections["critic"] = {"path": str(tmp_path / "nowhere")}
    assert "critic and its optimizer" not in counted(make_config(**sections)), "unknown counts for nothing"


def test_the_buffer_takes_what_may_be_in_flight_and_never_more_than_its_ceiling(tmp_path: Path) -> None:
    small = {"rollout": {"group_size": 2, "max_tokens": 8}, "learner": {"groups_per_step": 2}}
    assert counted(make_config(**small))["buffer"] < 1_000_000
    large = make_config(rollout={"group_size": 512, "max_tokens": 8192}, buffer={"memory_bytes": 4 * GB})
    assert 3 * GB < counted(large)["buffer"] <= 4 * GB


@pytest.mark.parametrize(
    ("sections", "num_versions"),
    [
        ({"rollout": {"replicas": 2}}, 3 + 2),
        ({"rollout": {"replicas": 2}, "weight_sync": {"parallelism": 4}}, 3 + 2 * 2),
        ({"rollout": {"replicas": 2, "standby": 1}, "weight_sync": {"parallelism": 4}}, 3 + 2 * 3),
        ({"rollout": {"replicas": {"min": 2, "max": 9}}, "weight_sync": {"parallelism": 4}}, 3 + 2 * 2),
        ({"rollout": {"replicas": {"min": 2, "max": 9}}, "launcher": {"ray": "auto"}}, 3),
        ({"rollout": {"replicas": 2, "standby": 1}, "launcher": {"ray": "auto"}}, 3),
    ],
)
def test_only_the_versions_of_replicas_that_are_here_for_certain_are_a_reason_to_refuse(
    tmp_path: Path, sections: dict[str, Any], num_versions: int
) -> None:
    config = make_config(model={"path": write_model(tmp_path / "m", body=GB)}, **sections)
    need = 2 * GB * num_versions
    assert list(checks.check_memory(config, Capacity(shm=need))) == []
    (line,) = checks.check_memory(config, Capacity(shm=need - 1))
    assert line.startswith("weight_sync.parallelism: ") and f"{NUM_AT_PUBLISHER} at the publisher" in line


def test_snapshots_and_stages_of_the_direct_path_are_counted_where_they_lie() -> None:
    for learner, where, share in (({"tp": 2}, HOST, 1), ({"tp": 2, "gpus": 1}, LEARNER_GPU, 2)):
        config = make_config(learner=learner, rollout={"replicas": 3}, weight_sync={"backend": "direct"})
        found = {part.what: part for part in count_parts(config, NUM_WEIGHTS, 3)}
        snapshots, stages = found["snapshots of versions"], found["stages of engine workers"]
        assert (snapshots.where, snapshots.num_bytes) == (where, 2 * 2 * NUM_WEIGHTS // share)
        assert (stages.where, stages.num_bytes) == (HOST, 2 * 2 * NUM_WEIGHTS * 3)
        weight_sync = {"backend": "direct", "encoding": "delta"}
        config = make_config(learner=learner, rollout={"replicas": 3}, weight_sync=weight_sync)
        found = {part.what: part for part in count_parts(config, NUM_WEIGHTS, 3)}
        assert found["snapshots of versions"].num_bytes == 3 * 2 * NUM_WEIGHTS // share, "and a base"
        assert found["stages of engine workers"].num_bytes == stages.num_bytes
    assert not any("snapshots" in part.what for part in count_parts(make_config(), NUM_WEIGHTS, 1))


@pytest.mark.parametrize(("gpus", "kind", "where"), [(0, "int8", HOST), (1, "fp8", ROLLOUT_GPU)])
def test_quantised_weights_of_an_engine_are_counted_with_one_byte(
    gpus: int, kind: str, where: str, tmp_path: Path
) -> None:
    model = write_model_folder(tmp_path, **SIZES)
    found = {}
    for quantization in (None, kind):
        rollout = {"gpus": gpus, "quantization": quantization}
        config = make_config(model={"path": str(model)}, rollout=rollout)
        parts = checks.count_all(config, 1, 1)
        (found[quantization],) = (part for part in parts if part.where == where and "engine" in part.what)
    size = checks.read_size(config)
    assert size is not None
    num_linear = size.num_weights - size.hidden_size * size.vocab_size
    assert num_linear > 0
    assert found[None].num_bytes - found[kind].num_bytes == num_linear  # bfloat16 to one byte
    assert found[kind].rule != found[None].rule


def test_quantised_experts_are_refused_before_a_start(tmp_path: Path) -> None:
    dense, mixture = (write_model_folder(tmp_path / name, **SIZES) for name in ("dense", "mixture"))
    table = json.loads((mixture / "config.json").read_text())
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    (mixture / "config.json").write_text(json.dumps(table | experts | {"moe_intermediate_size": 64}))
    for model, quantization, wanted in ((dense, "int8", 0), (mixture, None, 0), (mixture, "int8", 1)):
        config = make_config(model={"path": str(model)}, rollout={"quantization": quantization})
        found = [line for check_one in checks.PORTABLE_CHECKS for line in check_one(config)]
        assert len([line for line in found if "does not take a mixture of experts" in line]) == wanted
