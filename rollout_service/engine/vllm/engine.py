"""The vLLM adapter: an `Engine` over `AsyncLLM`.

vLLM's engine core runs in a child process; this process keeps the requests. Swaps pause generation
with `keep`: requests stay in flight, and the engine itself labels tokens with the version that
sampled them. A swap that fails leaves generation paused and `is_loaded` False until one works.

Measured on a CPU with 125 thousand parameters and responses of about five tokens: 1,100 to 1,900
responses/s, at 0.3 ms of this process and 0.6 ms of the engine core each. Rendered token prompts, flat
log-probs, final outputs only and no detokenizing are what keeps it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import gc
import importlib.metadata
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import ConfigError, EngineError
from asyncrl.core.experts import ITEM_BYTES, Rows, extend, item_bytes
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.staleness import UNLOADED, Span
from asyncrl.core.status.replica import CacheStatus
from rollout_service.engine.checkpoint import count_bytes
from rollout_service.engine.in_flight import CONTROL_DEADLINE_S, LOAD_BYTES_PER_S, InFlightEngine
from rollout_service.engine.protocol import Completion, EngineDied, Interrupted, Sampling
from rollout_service.engine.vllm.core import process
from rollout_service.engine.vllm.core.gauges import CacheGauges, drop_prometheus
from rollout_service.engine.vllm.core.process import CoreLog
from rollout_service.engine.vllm.environment import prepare_environment
from rollout_service.engine.vllm.features import check_features
from rollout_service.engine.vllm.nodes.peers import Peers
from rollout_service.engine.vllm.objects import AsyncLLM, TokenPrompt
from rollout_service.engine.vllm.plugin import (
    BACKEND,
    OTHER_WORKER,
    QUANTIZATIONS,
    REFUSED,
    REPORT,
    WORKER_EXTENSION,
)

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

    from weight_sync.memory.staging import Staged

log = logging.getLogger(__name__)

PLUGIN_GROUP = "vllm.general_plugins"
DEATH_WATCH_S = 0.5
WARM_UP_DEADLINE_S = 300.0
CPU_BATCH_TOKENS = 8192
ROUTED = {
    "worker_cls": "rollout_service.engine.vllm.core.routed.RoutedWorker",
    "scheduler_cls": "rollout_service.engine.vllm.core.routed.RoutedScheduler",
}
SHUTDOWN_S = 1.0
"""Nothing is to be saved: a core that has not ended by then is killed."""


@dataclass(frozen=True)
class VllmSettings:
    """Settings of the adapter.

    Attributes:
        model: A folder with a Hugging Face checkpoint in safetensors.
        dtype: `float32`, `bfloat16` or `float16`.
        max_model_tokens: Longest prompt and response together.
        max_sequences: Most requests in a batch.
        kv_cache_bytes: Size of the KV cache on CPU; a GPU's is sized by its free memory.
        recomputes_kv_cache: After a swap, compute the KV cache of running requests anew.
        caches_prefixes: Share the KV cache of equal prompts, within one version. What a request is
            sampled from then depends a little on what ran before it.
        num_gpus: Tensor-parallel size, over all its nodes; 0 runs on CPU.
        memory_share: Of its GPU's memory, if others are on that GPU too.
        cpu_workers: Tensor-parallel size on CPU; each is a process of its own.
        further_nodes: Ray's ids of the nodes beside this one, each with as many workers.
        num_cpus: That Ray reserves on each of those.
        seed: Seeds the engine; requests carry their own seeds.
        quantization: `int8` on CPU or `fp8` on GPUs, of weights as they are loaded; None keeps `dtype`.
        engine_args: Further arguments of `AsyncEngineArgs`.
        lora: Adapters that versions hold, if its rank is not 0; each version's are merged into the model.
        num_experts: Of the model, if completions are to say which ones each token was sent to; else 0.
    """

    model: str
    dtype: str
    max_model_tokens: int
    max_sequences: int
    kv_cache_bytes: int
    recomputes_kv_cache: bool = True
    caches_prefixes: bool = False
    num_gpus: int = 0
    memory_share: float | None = None
    cpu_workers: int = 1
    further_nodes: Sequence[str] = ()
    num_cpus: float = 0.0
    seed: int = 0
    quantization: str | None = None
    engine_args: Mapping[str, object] = field(default_factory=dict)
    lora: LoraSection = field(default_factory=LoraSection)
    num_experts: int = 0


T = TypeVar("T")


class VllmEngine(InFlightEngine[str]):
    """An `Engine` whose model runs in vLLM. See `protocol.Engine`."""

    LIBRARY, ABORT_EVERY_S = "vLLM", 0.001

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__()
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._gauges = CacheGauges()
        self._log = CoreLog()
        self._has_open_update = False
        self._child_pids: list[int] = []
        nodes = settings.further_nodes
        num_gpus = settings.num_gpus / (1 + len(nodes))
        self._peers = Peers(nodes, settings.num_cpus, num_gpus) if nodes else None

    @property
    def client(self) -> AsyncLLM:
        """The `AsyncLLM` itself, for vLLM's serving classes. Not before `start`."""
        assert self._llm is not None, "the engine was started"
        return self._llm

    def cache_salt(self) -> str | None:
        """Return what a prompt is salted with, so that it finds no prefix of an older version."""
        return str(self._serving.number) if self._settings.caches_prefixes else None

    def experts_of(self, completion: CompletionOutput) -> Rows | None:
        """Return the experts of a whole answer's prompt and tokens; None if none are recorded."""
        return _read_experts(completion.routed_experts, self._settings.num_experts)

    async def start(self) -> None:
        """Start vLLM, label its weights as version 0, and warm it up.

        Raises:
            EngineError: This vLLM lacks what the adapter needs, it cannot load the model, or the model has
                modules that a swap would leave with state of older weights.
        """
        prepare_environment(has_gpu=self._settings.num_gpus > 0)
        with process.without_collections():
            _check_plugin()
            check_features()
        if not self._settings.num_gpus:
            process.start_forkserver()
        before = set(_children())
        try:
            self._llm = _start_async_llm(self._settings, self._gauges, partial(self._spread, before))
        except (ValueError, RuntimeError, OSError) as error:
            what = f"vLLM cannot start with {self._settings.model}: {self._why(error)}"
            raise EngineError(what) from error
        finally:
            if self._peers is not None:
                self._peers.meet()
        self._child_pids = sorted(set(_children()) - before)
        await self._check_modules()
        await self._control(self.client.update_weight_version(str(UNLOADED)), "the first label")
        self._is_loaded = True
        await self._warm_up()

    def _spread(self, before: Collection[int], arguments: dict[str, object]) -> dict[str, object]:
        """Start the engine's part on further nodes; return the arguments of the part here."""
        if self._peers is None:
            return arguments
        return self._peers.start(arguments, lambda: _kill(set(_children()).difference(before)))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        """Sample one response; cancelling the call aborts the request in the engine."""
        self._running.add(request_id)
        try:
            output = await self._final_output(list(prompt_ids), sampling, request_id)
        finally:
            self._running.discard(request_id)
        completion = read_output(output, self._settings.num_experts)
        if completion.finish_reason == "abort":
            raise Interrupted(f"request {request_id} was ended before its end", completion=completion)
        if completion.finish_reason not in ("stop", "length") or not len(completion.token_ids):
            what = f"'{completion.finish_reason}' and {len(completion.token_ids)} tokens"
            raise EngineError(f"vLLM ended request {request_id} with {what}")
        return completion

    async def _abort(self, requests: list[str]) -> None:
        await self.client.abort(requests)

    async def _pause(self) -> None:
        pause = self.client.pause_generation(mode="keep", clear_cache=self._settings.recomputes_kv_cache)
        await self._control(pause, "the pause")

    async def _resume(self) -> None:
        await self._control(self.client.resume_generation(), "the resumption")

    async def _load(self, staged: Staged) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from rollout_service.engine.vllm.weight_transfer import describe_staged

        number, update = staged.version.number, describe_staged(staged, self._settings.lora)
        request = WeightTransferUpdateRequest(update_info=update)
        base_bytes = count_bytes(Path(self._settings.model)) if self._settings.lora.rank else 0
        await self._load_on_all(number, request, base_bytes + staged.manifest.total_bytes)
        label = self.client.update_weight_version(str(number))
        await self._control(label, f"the label of version {number}")

    async def _load_on_all(self, number: int, update: object, num_bytes: int) -> None:
        """Load on all workers, or raise what the first of them says. The label stays as it was."""
        llm, what = self.client, f"the load of version {number}"
        num_nodes = 1 + len(self._settings.further_nodes)  # that a version is sent to one after another
        within_s = CONTROL_DEADLINE_S + num_nodes * num_bytes / LOAD_BYTES_PER_S
        if self._has_open_update:  # an earlier load, or only its start, outlasted its deadline
            try:
                await self._control(llm.finish_weight_update(), "the end of an earlier load")
            except EngineDied:
                raise
            except EngineError as error:  # none is open any more, or the start below says what is wrong
                log.warning("%s", error)
        self._has_open_update = True
        await self._control(llm.start_weight_update(), what)
        await self._control(llm.update_weights(update), what, within_s)
        told = await self._control(llm.collective_rpc(REPORT), what, within_s)
        reports = msgspec.convert(told, list[tuple[str, float | None]])
        await self._control(llm.finish_weight_update(), what, within_s)
        self._has_open_update = False
        failures = [outcome for outcome, _ in reports if outcome]
        if failures:
            first = [failure for failure in failures if OTHER_WORKER not in failure]
            raise EngineError(f"vLLM refused {what}: {(first or failures)[0]}")
        self._probe_gap = next((gap for _, gap in reports if gap is not None), None)

    def cache_status(self) -> CacheStatus:
        return self._gauges.status()

    def child_pids(self) -> list[int]:
        return list(self._child_pids)

    async def shutdown(self) -> None:
        import psutil

        if self._llm is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # vLLM 0.32 kills a core that ends at that moment
                self._llm.shutdown(timeout=SHUTDOWN_S)
            self._llm = None
        if self._peers is not None:
            self._peers.close()

    async def _final_output(
        self, prompt_ids: list[int], sampling: Sampling, request_id: str
    ) -> RequestOutput:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = TokenPrompt(type="token", prompt_token_ids=prompt_ids)
        if (salt := self.cache_salt()) is not None:
            prompt["cache_salt"] = salt
        try:
            async for output in self.client.generate(prompt, _sampling_params(sampling), request_id):
                if output.finished:
                    return output
        except EngineDeadError as error:
            raise EngineDied(f"vLLM died: {self._why(error)}") from error
        except (EngineGenerateError, VLLMValidationError) as error:
            raise EngineError(f"vLLM failed request {request_id}: {_describe(error)}") from error
        raise EngineError(f"vLLM ended request {request_id} without a final output")

    async def _control(self, call: Awaitable[T], what: str, within_s: float | None = None) -> T:
        """Await one of vLLM's control calls, within a deadline, under our error class.

        vLLM 0.32 ends requests when its core dies, but never answers a control call that was under way.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        answer, within_s = asyncio.ensure_future(call), within_s or CONTROL_DEADLINE_S
        try:
            async with asyncio.timeout(within_s):
                while not (await asyncio.wait([answer], timeout=DEATH_WATCH_S))[0]:
                    if self.client.errored:
                        raise self.death(f" at {what}")
            return answer.result()
        except EngineDied:
            raise
        except TimeoutError as error:
            raise EngineError(f"vLLM did not finish {what} within {within_s:g} s") from error
        except EngineDeadError as error:
            raise EngineDied(f"vLLM died at {what}: {self._why(error)}") from error
        except Exception as error:  # vLLM passes a worker's exception on as a bare Exception
            raise EngineError(f"vLLM refused {what}: {_describe(error)}") from error
        finally:
            answer.cancel()

    async def _check_modules(self) -> None:
        call = self.client.collective_rpc(REFUSED)
        told = await self._control(call, "the look at the model's modules")
        by_worker = msgspec.convert(told, list[list[str]])
        if refused := by_worker[0]:
            more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
            raise EngineError(
                f"{self._settings.model} cannot be given new weights while it serves: {refused[0]}{more}",
                hint="Choose another model, or one that is not stored quantised",
            )

    def death(self, where: str = "") -> EngineDied:
        """Return the error of an engine whose core is gone, with what the core died of."""
        why = self._loss() or self._log.last_exception()
        return EngineDied(f"vLLM died{where}{f': {why}' if why else ''}")

    def _why(self, error: BaseException) -> str:
        """Return what the engine core died of; `error` only says where to look for it."""
        return self._loss() or self._log.last_exception() or _describe(error)

    def _loss(self) -> str:
        return self._peers.loss if self._peers is not None else ""

    async def _warm_up(self) -> None:
        """Run a full batch, because vLLM's first calls take seconds."""
        sampling = Sampling(temperature=1.0, max_tokens=2, seed=0)
        requests = (self.generate([0], sampling, f"warm-up-{i}") for i in range(self._settings.max_sequences))
        async with asyncio.timeout(WARM_UP_DEADLINE_S):
            await asyncio.gather(*requests)
        gc.collect()
        gc.freeze()  # vLLM's import leaves millions of objects that no collection needs to visit again


def _start_async_llm(
    settings: VllmSettings,
    gauges: CacheGauges,
    spread: Callable[[dict[str, object]], dict[str, object]] = dict,
) -> AsyncLLM:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import async_llm as vllm_client

    fault_point("rollout.engine")

    start_core = contextlib.nullcontext() if settings.num_gpus else process.forked_cores()
    with start_core:
        known = [argument.name for argument in fields(AsyncEngineArgs)]
        if unknown := [name for name in settings.engine_args if name not in known]:
            close = difflib.get_close_matches(unknown[0], known, n=3)
            raise ConfigError(
                f"rollout.engine_args: vLLM {vllm.__version__} has no {', '.join(unknown)}",
                hint=f"Near it: {', '.join(close)}" if close else "See 'vllm serve --help=all'",
            )
        arguments = AsyncEngineArgs(**spread(_engine_arguments(settings)))
        loggers = [gauges.factory]
        client: AsyncLLM = vllm_client.AsyncLLM.from_engine_args(arguments, stat_loggers=loggers)
        drop_prometheus(client)
        return client


def _engine_arguments(settings: VllmSettings) -> dict[str, object]:
    everywhere: dict[str, object] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_tokens,
        "max_num_seqs": settings.max_sequences,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": settings.caches_prefixes,
        "disable_log_stats": True,
        "seed": settings.seed,
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if settings.quantization is not None:
        everywhere["quantization"] = QUANTIZATIONS[settings.quantization]
    num_workers = settings.num_gpus or settings.cpu_workers
    everywhere["tensor_parallel_size"] = num_workers
    everywhere["distributed_executor_backend"] = "uni" if num_workers == 1 else "mp"
    if settings.num_gpus:
        share = settings.memory_share
        on_gpu: dict[str, object] = {} if share is None else {"gpu_memory_utilization": share}
        if settings.num_experts:
            on_gpu["enable_return_routed_experts"] = True
        return {**everywhere, **on_gpu, **settings.engine_args}
    on_cpu = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        # A prefill in chunks rewinds the generator of a seeded request, which a CPU generator cannot do:
        # the engine died when requests were recomputed after a swap.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_model_tokens, CPU_BATCH_TOKENS),
        **(ROUTED if settings.num_experts else {}),
    }
    return {**everywhere, **on_cpu, **settings.engine_args}


def _sampling_params(sampling: Sampling) -> object:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        ignore_eos=sampling.ignores_eos,
        logprobs=0,
        flat_logprobs=True,
        stop=list(sampling.stop) or None,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def read_output(output: RequestOutput, num_experts: int = 0) -> Completion:
    """Return the one completion of a final output, also that of a request that was aborted.

    Raises:
        EngineError: vLLM gives no log-probs or versions for some of its tokens.
    """
    completion = output.outputs[0]
    logprobs = completion.logprobs
    versions = completion.weight_versions
    if versions is None or len(logprobs.logprobs) != len(completion.token_ids):
        raise EngineError(f"vLLM gave no version or log-prob for each token of request {output.request_id}")
    return Completion(
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs.logprobs, dtype=np.float32),
        spans=tuple(Span(int(span.version), span.start, span.end) for span in versions),
        finish_reason=completion.finish_reason,
        experts=_read_experts(completion.routed_experts, num_experts),
    )


def _read_experts(routed: Rows | None, num_experts: int) -> Rows | None:
    """Return vLLM's rows with one more, of the last token: it was sampled and never read."""
    if routed is None or not num_experts:
        return None
    # vLLM's own rows of 256 experts have a byte each, and none for a token without a row
    rows = routed.astype(ITEM_BYTES[item_bytes(num_experts)], copy=False)
    return extend(rows, len(rows) + 1, None)


def _check_plugin() -> None:
    names = [entry.value for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP)]
    if not any(value.startswith("rollout_service.engine.vllm.plugin:") for value in names):
        raise EngineError(
            f"vLLM cannot find asyncrl's weight-transfer plugin in the entry points '{PLUGIN_GROUP}'",
            hint="Install asyncrl as a package (pip install -e .)",
        )


def _children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def _kill(pids: Collection[int]) -> None:
    """End processes of the engine that wait for workers which are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
