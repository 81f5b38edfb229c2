"""A model whose head is its embedding, in the real vLLM: both follow every swap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.versions import PolicyVersion
from rollout_service.engine.protocol import Sampling
from rollout_service.engine.vllm_engine import VllmEngine, VllmSettings
from rollout_service.tasks.digit_sort.vocabulary import encode_prompt
from rollout_service.tasks.digit_sort.warm_start import build_model
from tests.rollout.engine_parts import LoopThread, NamedTensors, logprobs_of, probe_of, save_model, stage

pytestmark = pytest.mark.long
PROMPT = encode_prompt([3, 1, 4, 2])


def make_tied_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(**(build_model(0).config.to_dict() | {"tie_word_embeddings": True}))
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(0.15 * torch.randn(parameter.shape))
    return model


def without_head(tensors: NamedTensors) -> NamedTensors:
    return [(name, tensor) for name, tensor in tensors if name != "lm_head.weight"]


def test_a_tied_head_follows_the_embedding_through_swaps_with_and_without_it(tmp_path: Path) -> None:
    folder = save_model(make_tied_model(0), tmp_path)
    loop = LoopThread()
    engine = VllmEngine(VllmSettings(str(folder), "float32", 1024, 8, 64 << 20))
    try:
        loop.call(engine.start())
        for number, change in ((1, without_head), (2, list), (3, without_head)):
            model = make_tied_model(number)
            with stage(model, PolicyVersion(number, number), probe_of(model), change) as staged:
                loop.call(engine.swap(staged))
            found = loop.call(engine.generate(PROMPT, Sampling(1.0, 20, number), f"r{number}"))
            wanted = logprobs_of(model, PROMPT, found.token_ids.tolist())
            assert (torch.tensor(found.logprobs) - wanted).abs().max() < 1e-4
    finally:
        loop.call(engine.shutdown())
        loop.close()
