"""Batch invariance of the real vLLM on CPU: an answer alone and beside others, equal to the bit."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from asyncrl.core.config.tree import Config
from rollout_service.engine.protocol import Sampling
from rollout_service.engine.vllm import variant
from rollout_service.engine.vllm.engine import VllmEngine
from tests.rollout.engine.engine_parts import LoopThread
from tests.rollout.engine.families import Form, Width, start_engine

WIDE = Form("qwen3", is_tied=False, vocab_size=131, width=Width(768, 2048, 12, 4, 64))
"""oneDNN multiplies a single row of it by another kernel than several."""
NUM_TOKENS = 24


def sample(engine: VllmEngine, loop: LoopThread, num_requests: int) -> list[list[float]]:
    """Return the log-probs of as many requests, of which the first is always the same."""

    async def run() -> list[list[float]]:
        requests = [
            engine.generate([5, 60, 33 + n], Sampling(1.0, NUM_TOKENS, 7 + n, ignores_eos=True), f"r{n}")
            for n in range(num_requests)
        ]
        return [found.logprobs.tolist() for found in await asyncio.gather(*requests)]

    return loop.call(run())


@pytest.mark.parametrize("is_padded", [True, False])
def test_an_answer_alone_is_that_of_a_batch_if_single_rows_are_padded(
    is_padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variant.PADS, str(int(is_padded)))
    loop = LoopThread()
    engine = start_engine(WIDE.build(0), tmp_path, loop, 1)
    try:
        (alone,), (repeated,) = (sample(engine, loop, 1) for _ in range(2))
        assert alone == repeated
        found = [sample(engine, loop, num_requests)[0] for num_requests in (2, 5)]
    finally:
        loop.call(engine.shutdown())
        loop.close()
    assert found[0] == found[1]
    assert (found[0] == alone) == is_padded, "this model would not show it"
    assert torch.tensor(found[0]).sub(torch.tensor(alone)).abs().max() < 1e-4


@pytest.mark.parametrize(("gpus", "is_padded"), [(0, True), (1, False)])
def test_the_mode_of_vllm_pads_on_a_cpu_and_is_passed_on_otherwise(
    gpus: int, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_service.engine.vllm.core.process.start_forkserver", lambda: None)
    monkeypatch.setenv(variant.BATCH_INVARIANT, "1")
    monkeypatch.setenv(variant.PADS, "0")
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "gsm8k"}}
    variant.VARIANT.prepare(Config(**sections, rollout={"gpus": gpus}))
    assert os.environ[variant.PADS] == str(int(is_padded))
    assert (variant.BATCH_INVARIANT in os.environ) == (not is_padded)
    assert variant.VARIANT.find_deterministic_mode() == variant.BATCH_INVARIANT
    monkeypatch.setenv(variant.PADS, "0")
    monkeypatch.setenv(variant.BATCH_INVARIANT, "0")
    assert not variant.VARIANT.find_deterministic_mode()
