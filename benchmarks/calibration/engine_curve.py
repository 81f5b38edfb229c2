"""Decode curve of vLLM, by running requests, and the cost of a prompt token; nothing else runs then."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from asyncrl.core.config.gpus import memory_share
from asyncrl.core.config.tree import Config

POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODED_TOKENS = 48
WARM_UP_TOKENS = 8
FIRST_ID = 5
REPEATS = 3
"""The fastest counts: what else the machine does only slows."""


def measure_curve(config: Config) -> tuple[tuple[tuple[float, float], ...], float]:
    """Return (running requests, tokens/s) up to `rollout.max_sequences`, and seconds per prompt token."""
    return asyncio.run(_measure(config))


async def _measure(config: Config) -> tuple[tuple[tuple[float, float], ...], float]:
    llm = _start(config)
    try:
        await _batch(llm, 1, FIRST_ID, WARM_UP_TOKENS)
        most = config.rollout.max_sequences
        points = sorted({*(n for n in POINTS if n < most), most})
        decoded = min(DECODED_TOKENS, config.rollout.max_tokens)
        took_s = {n: min([await _batch(llm, n, 4, decoded) for _ in range(REPEATS)]) for n in points}
        longest = max(8, config.data.max_prompt_tokens)
        short_s, long_s = [
            min([await _batch(llm, 8, size, 1) for _ in range(REPEATS)]) for size in (4, longest)
        ]
        curve = tuple((float(n), n * decoded / took_s[n]) for n in points)
        return curve, max(0.0, long_s - short_s) / (8 * max(1, longest - 4))
    finally:
        llm.shutdown()


def _start(config: Config) -> Any:
    from rollout_service.engine.vllm.environment import prepare_environment

    prepare_environment(has_gpu=config.rollout.gpus > 0)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    rollout = config.rollout
    share = memory_share(rollout.gpus)
    on_gpu = {} if share is None else {"gpu_memory_utilization": share}
    memory = on_gpu if rollout.gpus else {"kv_cache_memory_bytes": rollout.kv_cache_bytes}
    arguments = AsyncEngineArgs(
        model=config.model.path,
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_tokens + rollout.max_tokens,
        max_num_seqs=rollout.max_sequences,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        enforce_eager=not rollout.gpus,
        tensor_parallel_size=max(1, math.ceil(rollout.gpus)),
        skip_tokenizer_init=True,
        **memory,
    )
    return AsyncLLM.from_engine_args(arguments)


async def _batch(llm: Any, num_requests: int, prompt_tokens: int, max_tokens: int) -> float:
    """Answer so many requests at once; return the seconds."""
    began = time.perf_counter()
    name = f"{began:.6f}"
    async with asyncio.TaskGroup() as requests:
        for number in range(num_requests):
            requests.create_task(_answer(llm, f"{name}.{number}", number, prompt_tokens, max_tokens))
    return time.perf_counter() - began


async def _answer(llm: Any, name: str, seed: int, prompt_tokens: int, max_tokens: int) -> None:
    from vllm.sampling_params import RequestOutputKind

    prompt = {"type": "token", "prompt_token_ids": [FIRST_ID + (seed + i) % 7 for i in range(prompt_tokens)]}
    sampling = sampling_of(seed, max_tokens, RequestOutputKind.FINAL_ONLY)
    async for _ in llm.generate(prompt, sampling, name):
        pass


def sampling_of(seed: int, max_tokens: int, output_kind: Any) -> Any:
    """Return vLLM's parameters of a response of exactly `max_tokens`, sampled as a replica does."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=1.0,
        max_tokens=max_tokens,
        seed=seed,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=output_kind,
        skip_clone=True,
    )
