"""A vLLM on a CPU in a process of its own, called through a pipe: several can take turns.

Each runs on one thread and tells the processor time of what it did, so that other programs do not count.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollout_service.engine.vllm.environment import prepare_environment
from rollout_service.engine.vllm.plugin import PADS, QUANTIZATIONS

DEADLINE_S = 300.0


@dataclass(frozen=True)
class Kind:
    """How an engine runs.

    Attributes:
        adapter: The folder of an adapter that is served beside the model.
    """

    model: Path
    dtype: str = "float32"
    quantization: str | None = None
    pads_single_rows: bool = False
    adapter: Path | None = None


@dataclass(frozen=True)
class Request:
    """One answer to sample."""

    prompt: Sequence[int]
    num_tokens: int
    seed: int


@dataclass(frozen=True)
class Answer:
    """Tokens and their log-probs."""

    token_ids: list[int]
    logprobs: list[float]


class EngineProcess:
    """The engine as the study sees it."""

    def __init__(self, kind: Kind) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(kind, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def sample(self, requests: Sequence[Request]) -> tuple[list[Answer], float]:
        """Return the answers of one batch, and the processor time [s]."""
        found: tuple[list[Answer], float] = self._call("sample", requests)
        return found

    def merge(self, adapter: Path) -> float:
        """Merge the adapter into the engine's weights as weight sync does; return the processor time [s]."""
        return float(self._call("merge", adapter))

    def serve(self, adapter: Path) -> float:
        """Take the adapter in place of the one that is served; return the processor time [s]."""
        return float(self._call("serve", adapter))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join(DEADLINE_S)
        self._pipe.close()

    def _call(self, name: str, argument: object) -> Any:
        self._pipe.send((name, argument))
        return self._receive()

    def _receive(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError(f"an engine was silent for {DEADLINE_S:g} s")
        return self._pipe.recv()


def _serve(kind: Kind, pipe: Connection) -> None:
    os.environ[PADS] = str(int(kind.pads_single_rows))
    prepare_environment(has_gpu=False)
    engine = _Engine(kind)
    pipe.send(None)
    while True:
        name, argument = pipe.recv()
        pipe.send(getattr(engine, name)(argument))


class _Engine:
    """The engine in its process."""

    def __init__(self, kind: Kind) -> None:
        import torch
        from vllm import LLM

        torch.set_num_threads(1)
        self._kind = kind
        adapters: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 32, "max_loras": 1}
        self._llm = LLM(
            model=str(kind.model),
            dtype=kind.dtype,
            quantization=QUANTIZATIONS[kind.quantization] if kind.quantization else None,
            max_model_len=512,
            max_num_seqs=64,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            max_num_batched_tokens=8192,
            enforce_eager=True,
            kv_cache_memory_bytes=128 << 20,
            distributed_executor_backend="uni",
            disable_log_stats=True,
            **(adapters if kind.adapter else {}),
        )
        self._request = None if kind.adapter is None else self._request_of(kind.adapter)

    def sample(self, requests: Sequence[Request]) -> tuple[list[Answer], float]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=one.num_tokens, seed=one.seed, ignore_eos=True, logprobs=0, detokenize=False
            )
            for one in requests
        ]
        prompts = [{"prompt_token_ids": list(one.prompt)} for one in requests]
        began = time.process_time()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._request)
        spent = time.process_time() - began
        return [_answer(output.outputs[0]) for output in outputs], spent

    def merge(self, adapter: Path) -> float:
        import torch

        from learner.lora.folder import PREFIX, open_adapter
        from research.engines.models import LORA
        from rollout_service.engine.checkpoint import read_values
        from rollout_service.engine.vllm.reload import reload
        from weight_sync.encoding.low_rank import merge_factors

        stored = open_adapter(adapter, LORA)
        factors = {name.removeprefix(PREFIX): stored.read(name) for name in stored.names}
        worker = self._llm.llm_engine.model_executor.driver_worker.worker
        model, config = worker.model_runner.model, worker.model_config
        began = time.process_time()
        tensors = merge_factors(
            read_values(self._kind.model), factors, LORA.scale, config.dtype, torch.device("cpu")
        )
        reload(model, config, tensors)
        return time.process_time() - began

    def serve(self, adapter: Path) -> float:
        began = time.process_time()
        self._llm.llm_engine.add_lora(self._request_of(adapter))
        return time.process_time() - began

    @staticmethod
    def _request_of(adapter: Path) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", 1, str(adapter), load_inplace=True)


def _answer(output: Any) -> Answer:
    ids = list(output.token_ids)
    return Answer(ids, [table[token].logprob for table, token in zip(output.logprobs, ids, strict=True)])
