"""Models whose derived state a load would not renew, or that a learner sees otherwise, in the real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config

from asyncrl.core.errors import EngineError
from rollout_service.engine.protocol import Sampling
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from tests.different import assert_all_differ
from tests.rollout.engine.engine_parts import LoopThread, logprobs_of, save_model
from tests.rollout.engine.families import Form, swap

pytestmark = pytest.mark.long
TIED = Form("qwen3", is_tied=True, vocab_size=96)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def refusal_of(folder: Path, loop: LoopThread) -> str:
    engine = VllmEngine(VllmSettings(str(folder), "float32", 256, 8, 64 << 20))
    try:
        with pytest.raises(EngineError) as refused:
            loop.call(engine.start(), 280.0)
        return str(refused.value)
    finally:
        loop.call(engine.shutdown())


def save_with_head(folder: Path, factor: float) -> Path:
    """Write the tied model with a head of its own beside the embedding: `factor` times that."""
    TIED.build(0).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert HEAD not in tensors
    save_file({**tensors, HEAD: tensors[EMBEDDING] * factor}, file, {"format": "pt"})
    return folder


def test_latent_attention_is_refused_by_its_modules(loop: LoopThread, tmp_path: Path):
    config = DeepseekV3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=256,
        dtype="float32",
    )
    save_model(AutoModelForCausalLM.from_config(config), tmp_path)
    said = refusal_of(tmp_path, loop)
    assert "MLAAttention" in said and "processes its weights in a way of its own" in said


def test_a_tied_model_whose_checkpoint_has_another_head_is_refused(loop: LoopThread, tmp_path: Path):
    said = refusal_of(save_with_head(tmp_path, factor=2.0), loop)
    assert "config.json says tie_word_embeddings" in said and HEAD in said


def test_a_tied_model_whose_checkpoint_has_its_head_twice_follows_the_learner(
    loop: LoopThread, tmp_path: Path
):
    engine = VllmEngine(VllmSettings(str(save_with_head(tmp_path, factor=1.0)), "float32", 256, 8, 64 << 20))
    models = [TIED.build(seed) for seed in range(3)]
    assert_all_differ(models, in_every_tensor=True)
    try:
        loop.call(engine.start(), 280.0)
        for number, model in enumerate(models):
            if number:
                swap(engine, loop, number, model)
            found = loop.call(engine.generate([5, 6, 7], Sampling(1.0, 20, 1, ignores_eos=True), f"{number}"))
            wanted = logprobs_of(model, [5, 6, 7], found.token_ids.tolist())
            assert (torch.tensor(found.logprobs) - wanted).abs().max() < 1e-4
    finally:
        loop.call(engine.shutdown())
