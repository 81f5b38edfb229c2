"""A learner rank's whole work on a pretended GPU: no operation mixes devices, the host hardly ever waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.learner.parts.samples import save_model
from tests.pretended_gpu.learner.steps import (
    assert_is_published,
    assert_updates_alike,
    assert_weights_alike,
    result,
    run,
    run_on_gpu,
)

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with a pretended GPU has computed, and under "cpu" what the CPU computes."""
    dtype, folder = request.param, tmp_path_factory.mktemp("gpu")
    megatron, fsdp2 = f"{dtype}:tree", f"{dtype}:fsdp2:once:tree"
    run_on_gpu(folder, model := save_model(folder / "model"), [megatron, fsdp2])
    ours = {**result(folder, megatron), "fsdp2": result(folder, fsdp2)}
    on_cpu = {**run(model, megatron, folder / "cpu", 0), "fsdp2": run(model, fsdp2, folder / "cpu", 0)}
    return {**ours, "cpu": on_cpu, "tolerance": TOLERANCE[dtype]}


def test_all_of_the_model_is_on_the_gpu(found: dict[str, Any]) -> None:
    assert found["device"] == "cuda:0" and found["cpu"]["device"] == "cpu"


def test_attention_in_16_bit_is_the_kernel_s_for_variable_lengths(found: dict[str, Any]) -> None:
    assert (found["varlen calls"] > 0) == (found["tolerance"] == TOLERANCE["bfloat16"])


def test_a_prompt_is_computed_once_where_the_kernel_can_run_and_gives_what_the_cpu_gives(
    found: dict[str, Any],
) -> None:
    ways = [(found, found["cpu"]), (found["fsdp2"], found["cpu"]["fsdp2"])]
    for ours, wanted in ways:
        kernels = {"flash", "flash_backward"} if found["tolerance"] == TOLERANCE["bfloat16"] else set()
        assert ours["varlen calls of trees"].keys() == kernels
        for one, other in zip(ours["shared logprobs"], wanted["shared logprobs"], strict=True):
            torch.testing.assert_close(one, other, atol=found["tolerance"], rtol=0.0)


def test_deterministic_algorithms_are_there_for_all_that_a_rank_computes(found: dict[str, Any]) -> None:
    """The process in bfloat16 was told to use no others, which raise."""
    assert found["is deterministic"] == (found["tolerance"] == TOLERANCE["bfloat16"])


def test_gradients_of_matrices_are_added_in_float32_while_they_are_multiplied(found: dict[str, Any]) -> None:
    matrices = {name.rpartition("layers.")[2] for name in found["added while multiplied"]}
    wanted = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    assert matrices == {f"{layer}.{name}.weight" for layer in (0, 1) for name in wanted}


def test_log_probs_are_those_of_the_cpu(found: dict[str, Any]) -> None:
    for ours, wanted in zip(found["logprobs"], found["cpu"]["logprobs"], strict=True):
        torch.testing.assert_close(ours, wanted, atol=found["tolerance"], rtol=0.0)


@pytest.mark.parametrize("part", ["metrics", "rolled back", "resumed"])
def test_updates_before_and_after_a_rollback_and_a_resume_are_those_of_the_cpu(
    found: dict[str, Any], part: str
) -> None:
    assert_updates_alike(found[part], found["cpu"][part], found["tolerance"])
    assert all(one["actor/grad_norm"] > 0 for one in found[part])
    assert found["rolled back"] == found["resumed"]


def test_weights_that_are_exported_are_those_of_the_cpu(found: dict[str, Any]) -> None:
    assert_weights_alike(found["exported"], found["cpu"]["exported"], found["tolerance"])


def test_fsdp2_s_step_is_that_of_the_cpu_and_the_host_waits_as_often_as_with_megatron(
    found: dict[str, Any],
) -> None:
    ours, wanted = found["fsdp2"], found["cpu"]["fsdp2"]
    assert (ours["device"], ours["varlen calls"] > 0) == ("cuda:0", found["varlen calls"] > 0)
    assert_updates_alike(ours["metrics"], wanted["metrics"], found["tolerance"])
    assert_weights_alike(ours["exported"], wanted["exported"], found["tolerance"])
    assert ours["microbatches"] >= 3
    assert sum(ours["waits of gradients"].values()) <= 1, ours["waits of gradients"]
    assert 1 <= sum(ours["waits of a step"].values()) <= 3, ours["waits of a step"]


def test_the_host_waits_for_no_microbatch_and_three_times_for_a_step(found: dict[str, Any]) -> None:
    assert found["microbatches"] >= 3
    assert sum(found["waits of gradients"].values()) <= 1, found["waits of gradients"]
    assert 1 <= sum(found["waits of a step"].values()) <= 3, found["waits of a step"]


def test_a_version_is_published_as_it_is_exported(found: dict[str, Any]) -> None:
    """Through the pinned buffers, whose content is nonsense until the host has waited for it."""
    for one in (found, found["cpu"]):
        assert len(one["published"]["digests"]) > 3
        assert_is_published(one)
