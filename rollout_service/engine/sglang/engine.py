"""The SGLang adapter: an `Engine` over a child process that runs SGLang in an environment of its own.

Requests stay in SGLang while a swap pauses it; SGLang labels each token with the version that sampled it. A
swap that fails leaves generation paused and `is_loaded` False until one works. With
`kv_cache: recompute` running requests are retracted and prefilled anew; prefixes are not shared.
"""

from __future__ import annotations

import asyncio
import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.core.errors import EngineError
from asyncrl.core.staleness import Span
from rollout_service.engine.in_flight import CONTROL_DEADLINE_S, LOAD_BYTES_PER_S, InFlightEngine
from rollout_service.engine.protocol import Completion, EngineDied, Interrupted, Sampling
from rollout_service.engine.sglang.messages import (
    Abort,
    Generate,
    Generated,
    Load,
    Loaded,
    Pause,
    Resume,
    Start,
    Started,
)
from rollout_service.engine.sglang.process import ChildProcess, interpreter
from rollout_service.engine.sglang.windows import find_ignored_window
from rollout_service.engine.vllm.objects import CompletionOutput, ServingClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from weight_sync.memory.staging import Staged

START_DEADLINE_S = 900.0
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SPARE_TOKENS = 8
"""SGLang keeps a few positions of its context for itself; responses are cut at `max_model_tokens` here."""


@dataclass(frozen=True)
class SglangSettings:
    """Settings of the adapter, as `VllmSettings` has them.

    Attributes:
        has_stops: Whether requests may have stop strings: SGLang decodes every response then.
        serves_agents: Whether the gateway's serving classes ask it, through vLLM's front end.
        engine_args: Further arguments of `ServerArgs`, and `python`, the interpreter of SGLang's environment.
    """

    model: str
    dtype: str
    max_model_tokens: int
    max_sequences: int
    kv_cache_bytes: int
    has_stops: bool = False
    serves_agents: bool = False
    recomputes_kv_cache: bool = True
    num_gpus: int = 0
    memory_share: float | None = None
    seed: int = 0
    engine_args: Mapping[str, object] = field(default_factory=dict)


class SglangEngine(InFlightEngine[int]):
    """An `Engine` whose model runs in SGLang. See `protocol.Engine`."""

    LIBRARY, ABORT_EVERY_S = "SGLang", 0.02

    def __init__(self, settings: SglangSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._settings = settings
        self._tokenizer = tokenizer
        self._child = ChildProcess(interpreter(settings.engine_args), settings.num_gpus > 0)
        self._pids: list[int] = []
        self._client: ServingClient | None = None

    @property
    def client(self) -> ServingClient:
        """vLLM's front end over SGLang, for its serving classes. Not before `start`."""
        assert self._client is not None, "the engine was started, and serves agents"
        return self._client

    def cache_salt(self) -> str | None:
        """Return nothing: no prefix of another version is found, as none are cached."""
        return None

    def experts_of(self, _completion: CompletionOutput) -> None:
        """Return nothing: SGLang does not say which experts it chose."""

    def death(self) -> EngineDied:
        """Return the error of an engine whose process is gone."""
        return self._child.death or EngineDied("vLLM's front end over SGLang has ended; its error is above")

    async def start(self) -> None:
        """Start SGLang, whose weights are version 0, and warm it up.

        Raises:
            EngineError: There is no environment for it, or it cannot serve the model.
        """
        _check_window(self._settings)
        await self._child.start()
        start = Start(self._child.new_number(), engine_arguments(self._settings))
        try:
            started = await self._child.ask(start, f"the start with {self._settings.model}", START_DEADLINE_S)
        except BaseException:
            await self._child.end()
            raise
        assert isinstance(started, Started)
        self._pids = [self._child.pid, *started.pids]
        self._is_loaded = True
        await self.generate([0], Sampling(1.0, 2, 0), "warm-up")
        if self._settings.serves_agents:
            await self._open_client()

    async def _open_client(self) -> None:
        from rollout_service.engine.sglang.front_end import open_front_end

        settings = self._settings
        try:
            self._client = open_front_end(
                settings.model, settings.dtype, settings.max_model_tokens, self._child
            )
        except BaseException:
            await self._child.end()
            raise

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample one response; cancelling the call aborts the request in the engine."""
        room = self._settings.max_model_tokens - len(prompt_ids)
        if not len(prompt_ids) or room < 1:
            raise EngineError(
                f"request {request_id} has a prompt of {len(prompt_ids)} tokens, with room for {room}"
            )
        ask = Generate(
            number=(number := self._child.new_number()),
            prompt_ids=np.asarray(prompt_ids, np.int32).tobytes(),
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, room),
            seed=sampling.seed,
            ignores_eos=sampling.ignores_eos,
            stop_ids=[self._tokenizer.eos_token_id],
            stop=list(sampling.stop),
        )
        self._running.add(number)
        try:
            answer = await self._child.ask(ask, f"request {request_id}")
        except asyncio.CancelledError:
            await self._abort([number])
            raise
        finally:
            self._running.discard(number)
        assert isinstance(answer, Generated)
        completion = _completion(answer, request_id)
        return self._cut(completion, sampling.stop) if sampling.stop else completion

    def _cut(self, completion: Completion, stop: Sequence[str]) -> Completion:
        """End the response with the token that completes a stop string; SGLang misses one across specials."""

        def is_complete(end: int) -> bool:
            text = self._tokenizer.decode(completion.token_ids[:end].tolist(), skip_special_tokens=True)
            return any(string in text for string in stop)

        num_tokens = len(completion.token_ids)
        end = bisect.bisect_left(range(1, num_tokens + 1), True, key=is_complete) + 1
        if end >= num_tokens:
            return completion
        spans = tuple(replace(span, end=min(span.end, end)) for span in completion.spans if span.start < end)
        return Completion(completion.token_ids[:end], completion.logprobs[:end], spans, "stop")

    async def _abort(self, requests: list[int]) -> None:
        self._child.tell(Abort(self._child.new_number(), requests))

    async def _pause(self) -> None:
        pause = Pause(self._child.new_number(), not self._settings.recomputes_kv_cache)
        await self._child.ask(pause, "the pause", CONTROL_DEADLINE_S)

    async def _resume(self) -> None:
        await self._child.ask(Resume(self._child.new_number()), "the resumption", CONTROL_DEADLINE_S)

    async def _load(self, staged: Staged) -> None:
        child, number, recomputes = self._child, staged.version.number, self._settings.recomputes_kv_cache
        within_s = CONTROL_DEADLINE_S + staged.manifest.total_bytes / LOAD_BYTES_PER_S
        load = Load(child.new_number(), staged.path, staged.manifest.to_bytes(), number, recomputes)
        answer = await child.ask(load, f"the load of version {number}", within_s)
        assert isinstance(answer, Loaded)
        self._probe_gap = answer.probe_gap

    def child_pids(self) -> list[int]:
        return list(self._pids)

    async def shutdown(self) -> None:
        if self._client is not None:
            self._client.shutdown()
            self._client = None
        await self._child.end()


def engine_arguments(settings: SglangSettings) -> dict[str, object]:
    """Return SGLang's arguments, by the names of its `ServerArgs`."""
    everywhere: dict[str, object] = {
        "model_path": settings.model,
        "dtype": settings.dtype,
        "context_length": settings.max_model_tokens + SPARE_TOKENS,
        "max_running_requests": settings.max_sequences,
        "random_seed": settings.seed,
        "skip_tokenizer_init": not settings.has_stops,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "log_level": "warning",
        # Seeds count in this mode alone. A prefix that older weights computed would be found after a swap.
        "enable_deterministic_inference": True,
        "disable_radix_cache": True,
    }
    own = {name: value for name, value in settings.engine_args.items() if name != "python"}
    if settings.num_gpus:
        share = settings.memory_share
        return {**everywhere, **({} if share is None else {"mem_fraction_static": share}), **own}
    on_cpu = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": max(
            settings.kv_cache_bytes // _token_bytes(settings), settings.max_model_tokens + SPARE_TOKENS
        ),
    }
    return {**everywhere, **on_cpu, **own}


def _token_bytes(settings: SglangSettings) -> int:
    """Return the bytes of one token's keys and values."""
    config = json.loads((Path(settings.model) / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_size
    return int(values * ITEM_BYTES[settings.dtype])


def _completion(answer: Generated, request_id: str) -> Completion:
    """Return SGLang's answer as a completion, checked.

    Raises:
        Interrupted: The request was aborted.
        EngineError: There is no token, or one without a log-prob or version.
    """
    completion = Completion(
        token_ids=np.frombuffer(answer.token_ids, np.int32),
        logprobs=np.frombuffer(answer.logprobs, np.float32),
        spans=tuple(Span(*span) for span in answer.spans),
        finish_reason=answer.finish_reason,
    )
    if completion.finish_reason == "abort":
        raise Interrupted(f"request {request_id} was ended before its end", completion=completion)
    num_tokens, covered = len(completion.token_ids), completion.spans[-1].end if completion.spans else 0
    if completion.finish_reason not in ("stop", "length") or not num_tokens:
        what = f"'{completion.finish_reason}' and {num_tokens} tokens"
        raise EngineError(f"SGLang ended request {request_id} with {what}")
    if not num_tokens == len(completion.logprobs) == covered:
        raise EngineError(f"SGLang gave no version or log-prob for each token of request {request_id}")
    return completion


def _check_window(settings: SglangSettings) -> None:
    """Raise EngineError for a sliding window of attention that SGLang would leave out."""
    table = json.loads((Path(settings.model) / "config.json").read_text())
    if problem := find_ignored_window(table, settings.max_model_tokens):
        hint = "Use rollout.engine: vllm, or rows that are no longer"
        raise EngineError(f"model.path '{settings.model}': {problem}", hint=hint)
