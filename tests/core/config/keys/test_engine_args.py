"""`rollout.engine_args`: all that the engine takes, but what a replica sets itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.config.load import load_config
from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.config.tree import Config
from asyncrl.core.variants import engine_facts

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
