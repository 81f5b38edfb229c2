"""`rollout.engine_args`: all that the engine takes, but what a replica sets itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.config.load import load_config
from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.config.tree import Config
from asyncrl.core.variants import engine_facts
from asyncrl.planner.plan.names import check_algorithm

OWNED = engine_facts("vllm").owned_args or {}
ON_CPU = engine_facts("vllm").owned_args_on_cpu
HEAD = "model: {path: m}\ndata: {train: t}\nreward: {fn: f}\n"
FREE = "{gpu_memory_utilization: 0.5, max_num_batched_tokens: 16384, compilation_config: {level: 3}}"


def read(folder: Path, engine_args: str, *overrides: str) -> Config:
    file = folder / "a.yaml"
    file.write_text(f"{HEAD}rollout:\n  engine_args: {engine_args}\n")
    return load_config(file, overrides)


@pytest.mark.parametrize("gpus", [0, 1])
def test_arguments_that_tune_the_engine_are_free(tmp_path: Path, gpus: int) -> None:
    config = read(tmp_path, FREE, f"rollout.gpus={gpus}")
    expected = {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 16384}
    assert config.rollout.engine_args == {**expected, "compilation_config": {"level": 3}}


@pytest.mark.parametrize("name", sorted({**OWNED, **ON_CPU}))
def test_an_argument_that_a_replica_sets_itself_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        read(tmp_path, f"{{{name}: x}}")
    (problem,) = caught.value.problems
    assert problem.what == f"rollout.engine_args: {name} is not free for vLLM"
    assert problem.hint == f"Leave it out: {ON_CPU.get(name) or OWNED[name]}"
    assert problem.where.endswith("a.yaml:5:16")


@pytest.mark.parametrize("name", sorted(ON_CPU))
def test_on_a_gpu_the_engines_cache_graphs_and_chunks_are_the_users(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, f"{{{name}: 1}}", "rollout.gpus=1").rollout.engine_args == {name: 1}


def test_an_engine_without_arguments_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblems, match="takes no arguments"):
        read(tmp_path, FREE, "rollout.engine=scripted")
    assert read(tmp_path, "{}", "rollout.engine=scripted").rollout.engine_args == {}


MIXED = "rollout.engine=[vllm, sglang, vllm]"


def test_arguments_of_several_engines_stand_by_engine_and_each_replica_has_those_of_its_own(
    tmp_path: Path,
) -> None:
    config = read(tmp_path, "{vllm: {block_size: 32}, sglang: {python: p}}", MIXED)
    replicas = [config.of_replica(index).rollout for index in range(5)]
    assert [one.engine for one in replicas] == ["vllm", "sglang", "vllm", "vllm", "sglang"]
    assert [one.engine_args for one in replicas[:2]] == [{"block_size": 32}, {"python": "p"}]
    assert read(tmp_path, "{vllm: {block_size: 32}}", MIXED).of_replica(1).rollout.engine_args == {}
    assert list(config.by_engine) == ["vllm", "sglang"]


@pytest.mark.parametrize(
    ("engine_args", "what", "hint"),
    [
        ("{block_size: 32}", "block_size: not the arguments of one engine", "{vllm: {...}, sglang: {...}}"),
        ("{scripted: {}}", "scripted: not the arguments of one engine", "{vllm: {...}, sglang: {...}}"),
        ("{vllm: 3}", "vllm: not the arguments of one engine", "{vllm: {...}, sglang: {...}}"),
        ("{sglang: {tp_size: 2}}", "tp_size is not free for SGLang", "one engine on rollout.gpus"),
        ("{vllm: {seed: 2}}", "seed is not free for vLLM", "it is run.seed"),
    ],
)
def test_arguments_that_do_not_say_whose_they_are_or_are_not_free_are_refused(
    tmp_path: Path, engine_args: str, what: str, hint: str
) -> None:
    with pytest.raises(ConfigProblems) as caught:
        read(tmp_path, engine_args, MIXED)
    (problem,) = caught.value.problems
    assert what in problem.what and hint in problem.hint


def test_a_list_of_one_engine_is_that_engine(tmp_path: Path) -> None:
    config = read(tmp_path, "{block_size: 32}", "rollout.engine=[vllm, vllm]")
    assert (config.rollout.engine, config.of_replica(1)) == ("vllm", config)


@pytest.mark.parametrize(
    ("engine", "hint"), [("[]", ""), ("[vllm, sgland]", "Did you mean 'sglang'?"), ("3", "")]
)
def test_what_names_no_engine_is_refused_with_those_that_there_are(
    tmp_path: Path, engine: str, hint: str
) -> None:
    with pytest.raises(ConfigProblems, match="one of scripted, sglang, vllm, or a list of them") as caught:
        read(tmp_path, "{}", f"rollout.engine={engine}")
    assert caught.value.problems[0].hint == hint


def test_a_gateway_needs_engines_that_all_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblems, match=r"rollout\.engine: scripted has no gateway") as caught:
        read(tmp_path, "{}", "rollout.engine=[sglang, scripted, vllm]", "rollout.gateway={port: 0}")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("overrides", "what", "hint"),
    [
        (["rollout.quantization=fp8"], "fp8 is not there with vLLM on CPU", "Set int8, or leave it out"),
        (
            ["rollout.quantization=int8", "rollout.gpus=1"],
            "int8 is not there with vLLM on GPUs",
            "Set fp8, or leave it out",
        ),
        (
            ["rollout.quantization=int8", MIXED],
            "int8 is not there with SGLang on CPU",
            "Leave it out",
        ),
    ],
)
def test_a_quantization_that_an_engine_does_not_have_where_it_runs_is_refused(
    tmp_path: Path, overrides: list[str], what: str, hint: str
) -> None:
    with pytest.raises(ConfigProblems) as caught:
        read(tmp_path, "{}", *overrides)
    (problem,) = caught.value.problems
    assert what in problem.what and hint in problem.hint


def test_a_gpu_engine_is_told_vllm_s_name_of_the_quantization(tmp_path: Path) -> None:
    from rollout_service.engine.vllm.engine import _engine_arguments
    from rollout_service.engine.vllm.variant import settings_of

    config = read(tmp_path, "{}", "rollout.quantization=fp8", "rollout.gpus=1")
    assert _engine_arguments(settings_of(config))["quantization"] == "fp8_per_tensor"
    assert "quantization" not in _engine_arguments(settings_of(read(tmp_path, "{}")))


@pytest.mark.parametrize(
    ("algorithm", "is_refused"),
    [
        ([], False),
        (["algorithm.correction=disabled"], True),
        (["algorithm.correction=disabled", "algorithm.prox=behaviour"], False),
        (["algorithm.correction=bypass_ppo_clip"], False),
        (["algorithm.correction=disabled", 'algorithm.rejection={seq_mean_k1: "0.8_1.25"}'], False),
        (["algorithm.correction=mine:correction"], False),
    ],
)
def test_the_log_probs_of_a_quantised_engine_must_be_corrected(
    tmp_path: Path, algorithm: list[str], is_refused: bool
) -> None:
    found = list(check_algorithm(read(tmp_path, "{}", "rollout.quantization=int8", *algorithm)))
    assert [line.partition(":")[0] for line in found] == ["rollout.quantization"] * is_refused
    assert not list(check_algorithm(read(tmp_path, "{}", *algorithm)))
