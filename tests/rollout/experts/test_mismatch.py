"""Log-probs of a learner in bfloat16 against those of the real vLLM that sampled, with and without replay.

Its routers choose otherwise than the engine's where scores are near; then another expert answers. Printed:
`pytest -s -m long tests/rollout/experts/test_mismatch.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.experts import split
from learner.batching.batch import PackedBatch, build_batch
from learner.batching.routing import forget_routes
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.tasks.digit_sort.vocabulary import BOS, EOS, PAD
from tests.learner.parts.training import open_backend, open_fsdp2
from tests.rollout.engine.engine_parts import LoopThread
from tests.rollout.engine.families import start_engine

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
VOCABULARY, NUM_ANSWERS, NUM_TOKENS = 96, 64, 64
SPREAD = 0.12
"""Of weights: with less, routing and log-probs are nearly even, and nothing differs."""
LESS = 10.0


def make_mixture(num_layers: int, num_experts: int, num_active: int) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=64,
        num_experts=num_experts,
        num_experts_per_tok=num_active,
        norm_topk_prob=True,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, SPREAD)
    return model.bfloat16()


def sample(model: PreTrainedModel, folder: Path, num_experts: int) -> PackedBatch:
    """Return a batch of answers that vLLM has sampled in bfloat16, with the experts that it chose."""
    loop = LoopThread()
    engine = start_engine(model, folder, loop, dtype="bfloat16", num_experts=num_experts)

    async def run() -> list[Completion]:
        asked = (
            engine.generate(
                prompt_of(number), Sampling(1.0, NUM_TOKENS, number, ignores_eos=True), f"{number}"
            )
            for number in range(NUM_ANSWERS)
        )
        return await asyncio.gather(*asked)

    try:
        completions = loop.call(run(), 280.0)
    finally:
        loop.call(engine.shutdown())
        loop.close()
    groups = []
    for number, one in enumerate(completions):
        prompt_experts, experts = split(one.experts, len(one.token_ids))
        mask = np.ones(len(one.token_ids), np.uint8)
        answer = Trajectory(one.token_ids, mask, one.logprobs, one.spans, 0.0, "length", experts=experts)
        prompt = np.asarray(prompt_of(number), np.int32)
        groups.append(Group(number, 1, prompt, (answer,), prompt_experts=prompt_experts))
    return build_batch(groups, 0, {0: 0})


def prompt_of(number: int) -> list[int]:
    return [(number * 7 + place * 5) % VOCABULARY for place in range(8 + number % 40)]


def mismatch(backend: Any, batch: PackedBatch) -> dict[str, float]:
    """Return how far the learner is from the engine, in nats; k3 estimates their divergence."""
    logprobs_N, is_told_N = backend.logprobs(batch)[0].float(), batch.loss_mask_N > 0
    ratio_T = (logprobs_N - batch.behaviour_N)[is_told_N]
    return {
        "max": float(ratio_T.abs().max()),
        "mean": float(ratio_T.abs().mean()),
        "k3": float((ratio_T.exp() - 1 - ratio_T).mean()),
    }


@pytest.mark.parametrize("sizes", [(2, 8, 2), (4, 32, 4)], ids=str)
def test_replay_takes_nine_tenths_of_the_mismatch_of_bfloat16(tmp_path: Path, sizes: tuple[int, int, int]):
    batch = sample(make_mixture(*sizes), tmp_path, sizes[1])
    assert batch.experts_N is not None and int(batch.loss_mask_N.sum()) == NUM_ANSWERS * NUM_TOKENS
    for name, opener in (("megatron", open_backend), ("fsdp2", open_fsdp2)):
        backend = opener(tmp_path, dtype="bfloat16")
        alone, replayed = mismatch(backend, forget_routes(batch)), mismatch(backend, batch)
        backend.close()
        shown = {what: f"{alone[what]:.3g} -> {replayed[what]:.3g}" for what in alone}
        print(f"{name}, (layers, experts, chosen) {sizes}: {shown}")
        assert replayed["k3"] * LESS < alone["k3"], (name, alone, replayed)


def test_rows_of_another_token_make_it_worse(tmp_path: Path):
    """Else the figures above would not tell rows from wrong ones."""
    batch = sample(make_mixture(2, 8, 2), tmp_path, 8)
    assert batch.experts_N is not None
    shifted_N = torch.where(batch.experts_N >= 0, batch.experts_N.roll(1, 0), batch.experts_N)
    shifted_N[(shifted_N < 0).any(-1).any(-1)] = -1
    backend = open_backend(tmp_path, dtype="bfloat16")
    alone = mismatch(backend, forget_routes(batch))
    assert mismatch(backend, dataclasses.replace(batch, experts_N=shifted_N))["k3"] > 10 * alone["k3"]
    backend.close()
