"""A scripted engine as vLLM's serving classes see one: the same behind the gateway and behind vLLM's server.

It answers with digits, as many as are asked for, at `tokens_per_s` per request. Like vLLM's client it hands
over with the next output what has come while its reader was busy. Owns no detokenizer and no scheduler: what
is left to measure is the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.scripted.engine import NUM_DIGITS, ScriptedEngine, scripted_logprob

TASKS = ("generate",)


def engine_arguments(folder: Path, max_tokens: int, max_sequences: int) -> dict[str, Any]:
    """Return vLLM's arguments of the benchmark's model, for either server."""
    return {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": max_tokens,
        "max_num_seqs": max_sequences,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": max(8192, max_tokens),
        "kv_cache_memory_bytes": 256 << 20,
        "disable_log_stats": True,
    }


class ScriptedClient:
    """The part of vLLM's `EngineClient` that servers call.

    Args:
        engine: Says which version answers; None answers as version 0.
    """

    errored, is_running, is_stopped = False, True, False
    dead_error = RuntimeError("a scripted engine does not die")

    def __init__(
        self, arguments: Mapping[str, Any], tokens_per_s: float, engine: ScriptedEngine | None = None
    ) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.logprobs import Logprob
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.input_processor import InputProcessor

        self.vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self._token_s = 1.0 / tokens_per_s if tokens_per_s else 0.0
        self._engine = engine
        self._ids = [self.renderer.tokenizer.convert_tokens_to_ids(str(one)) for one in range(NUM_DIGITS)]
        self._logprobs = [
            {token: Logprob(scripted_logprob(digit, 0), 1, str(digit))}
            for digit, token in enumerate(self._ids)
        ]
        self._aborted: set[str] = set()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Take everything."""

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield digits as the time of a token goes by, or all at the end, as `sampling_params` says."""
        from vllm.sampling_params import RequestOutputKind

        num_tokens, loop = sampling_params.max_tokens, asyncio.get_running_loop()
        is_streamed = sampling_params.output_kind is RequestOutputKind.DELTA
        begun, at = loop.time(), 0
        first = (sampling_params.seed or 0) % NUM_DIGITS
        while at < num_tokens:
            wanted = at + 1 if is_streamed else num_tokens
            await asyncio.sleep(max(0.0, begun + wanted * self._token_s - loop.time()))
            if request_id in self._aborted:
                self._aborted.discard(request_id)
                yield self._output(prompt, request_id, first, at, at, "abort", sampling_params)
                return
            if is_streamed and self._token_s:
                wanted = max(wanted, min(num_tokens, int((loop.time() - begun) / self._token_s)))
            reason = "length" if wanted == num_tokens else None
            yield self._output(prompt, request_id, first, at, wanted, reason, sampling_params)
            at = wanted

    def _output(
        self, prompt: Any, request_id: str, first: int, start: int, end: int, reason: str | None, params: Any
    ) -> Any:
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

        digits = [(first + place) % NUM_DIGITS for place in range(start, end)]
        version = str(self._engine.serving.number if self._engine else 0)
        answer = CompletionOutput(
            0,
            "".join(map(str, digits)),
            [self._ids[digit] for digit in digits],
            None,
            None if params.logprobs is None else [self._logprobs[digit] for digit in digits],
            finish_reason=reason,
            weight_versions=[WeightVersionSpan(version, 0, end)] if reason else None,
        )
        return RequestOutput(
            request_id, None, list(prompt["prompt_token_ids"]), None, [answer], finished=reason is not None
        )

    async def abort(self, request_ids: list[str]) -> None:
        """End requests with their next token."""
        self._aborted.update(request_ids)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

    async def is_tracing_enabled(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """End nothing."""


class ServedEngine(ScriptedEngine):
    """A scripted engine whose client the gateway can serve."""

    def __init__(self, arguments: Mapping[str, Any], tokens_per_s: float) -> None:
        client = ScriptedClient(arguments, tokens_per_s, self)
        super().__init__(client.renderer.tokenizer.eos_token_id, tokens_per_s)
        self.client = client

    def cache_salt(self) -> str | None:
        return None

    def death(self) -> EngineDied:
        return EngineDied("a scripted engine died")
