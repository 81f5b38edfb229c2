"""Tensors of a model according to its config.json, against the models of the library."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.core.config.tree import Config
from asyncrl.models.architectures import ModelSize, find_unsupported, is_tied
from asyncrl.models.named_models import count_weights, tensor_shapes
from asyncrl.planner.plan.checks import check_heads
from asyncrl.planner.plan.footprint.sizes import count_expert_weights, count_held_weights
from tests.rollout.engine.engine_parts import sent_tensors
from tests.rollout.engine.families import CONFIGS, GROUPED, PLAIN, WIDTHS, Form

MIXTURES = [Form(family, is_tied=False, vocab_size=87) for family in ("qwen3_moe", "mixtral", "olmoe")]

FORMS = [
    Form(family, is_tied, 87, width)
    for family in CONFIGS
    for is_tied in (True, False)
    for width in (WIDTHS[:3] if family == "qwen2" else WIDTHS)
] + MIXTURES
FORMS += [Form(family, is_tied=family == "gemma", vocab_size=87) for family in ("mistral", "phi3", "gemma")]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_tensors_that_a_config_tells_of_are_those_of_the_model(form: Form) -> None:
    model = form.build(seed=1)
    there = {name: tuple(tensor.shape) for name, tensor in sent_tensors(model).items()}
    told = dict(tensor_shapes(model.config.to_dict(), has_head=True))
    assert told.items() <= there.items()
    matrices = {name for name, shape in there.items() if len(shape) == 2}
    assert matrices == set(told)
    assert count_weights(model.config.to_dict()) == sum(math.prod(shape) for shape in there.values())


@pytest.mark.parametrize("form", MIXTURES, ids=str)
def test_a_token_meets_some_of_the_experts_and_the_memory_holds_all(form: Form) -> None:
    model = form.build(seed=1)
    table, tensors = model.config.to_dict(), sent_tensors(model)
    size, embedding = ModelSize.read(table), tensors["model.embed_tokens.weight"].numel()
    experts = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 2) - embedding
    assert size.experts is not None and count_expert_weights(size) == experts
    assert size.num_weights == matrices - experts + experts * 2 // size.experts.num
    assert count_held_weights(size) == matrices
    assert count_weights(table) == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("family", [*GROUPED, "qwen3_moe", "qwen3"])
def test_the_operations_that_are_counted_are_those_that_the_library_does(family: str) -> None:
    """Shared experts, a first dense layer, and latent attention too."""
    model = Form(family, is_tied=False, vocab_size=87).build(seed=1)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"
    size, num_tokens = ModelSize.read(model.config.to_dict()), 40
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.arange(num_tokens)[None])
    angles = 2 * num_tokens * model.model.rotary_emb.inv_freq.numel()  # a product in some of them
    assert counted.get_total_flops() - size.forward_flops(num_tokens, num_tokens**2) in (0, angles)


@pytest.mark.parametrize("family", GROUPED)
def test_the_memory_of_grouped_experts_is_that_of_all_tensors(family: str) -> None:
    model = Form(family, is_tied=False, vocab_size=87).build(seed=1)
    size, tensors = ModelSize.read(model.config.to_dict()), sent_tensors(model)
    matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 2)
    assert count_held_weights(size) == matrices - tensors["model.embed_tokens.weight"].numel()
    each = 512 + 64 if size.latent else 2 * 1 * 32
    assert size.num_cached == 2 * each


@pytest.mark.parametrize(("rank", "num_problems"), [(512, 0), (32, 1)])
def test_a_latent_without_a_kernel_on_a_cpu_is_refused(rank: int, num_problems: int, tmp_path: Path) -> None:
    table = Form("deepseek_v3", is_tied=False, vocab_size=87).build(seed=1).config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(table | {"kv_lora_rank": rank}))
    sections = {"model": {"path": str(tmp_path)}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
    found = list(check_heads(Config(**sections, rollout={"gpus": 0})))
    assert len(found) == num_problems
    assert all("for heads of 96 (kv_lora_rank + qk_rope_head_dim), only of 576;" in one for one in found)
    assert not list(check_heads(Config(**sections, rollout={"gpus": 1})))


def test_a_model_that_is_not_supported_is_told_nothing_of() -> None:
    table = Form("qwen3", False, 87, PLAIN).build(seed=1).config.to_dict()
    assert not dict(tensor_shapes(table | {"model_type": "gemma2"}, has_head=True))
    assert not dict(tensor_shapes({"model_type": "qwen3"}, has_head=True))


def test_a_config_of_gemma_that_does_not_say_it_means_a_tied_embedding() -> None:
    table = Form("gemma", is_tied=True, vocab_size=87).build(seed=1).config.to_dict()
    del table["tie_word_embeddings"]
    assert is_tied(table) and "lm_head.weight" not in dict(tensor_shapes(table, has_head=True))
    assert not is_tied(table | {"model_type": "llama"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 63, "max_position_embeddings": 64}, "sliding_window: 63 is not supported"),
        ({"sliding_window": 63}, "sliding_window: 63 is not supported"),
        ({"partial_rotary_factor": 0.5}, "rotates a part of each head"),
        (
            {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}},
            "rotates a part of each head",
        ),
        ({"kv_lora_rank": 32}, "its attention is latent"),
    ],
)
def test_a_feature_that_no_record_has_is_refused(changes: dict[str, object], words: str) -> None:
    found = [problem for problem, _ in find_unsupported({"model_type": "llama"} | changes)]
    assert len(found) == 1 and words in found[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 64, "max_position_embeddings": 64},
        {"sliding_window": 63, "use_sliding_window": False},
        {"partial_rotary_factor": 1.0},
        {"layer_types": ["full_attention"] * 2},
    ],
)
def test_a_feature_without_effect_is_no_reason_to_refuse(changes: dict[str, object]) -> None:
    assert not list(find_unsupported({"model_type": "llama"} | changes))
