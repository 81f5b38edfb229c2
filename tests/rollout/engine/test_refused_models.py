"""Models whose derived state a load would not renew, or that a learner sees otherwise, in the real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.core.errors import EngineError
from rollout_service.engine.protocol import Sampling
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from tests.different import assert_all_differ
from tests.rollout.engine.engine_parts import LoopThread, logprobs_of
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
