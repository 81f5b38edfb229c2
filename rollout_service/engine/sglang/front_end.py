"""vLLM's front end over SGLang, for the gateway: vLLM's forms, parsers and detokenizer, SGLang's tokens.

Owns the seat of vLLM's engine core: a request of vLLM's becomes one of the child process, whose tokens come
back as the core's outputs. Steers nothing: swaps and interruptions are the adapter's. Invariant: each token
has the log-prob and the version that SGLang gave it.

Shapes: T new tokens of a request, K most probable tokens beside each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.core.errors import EngineError
from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.sglang.messages import Abort, Generate, Generated
from rollout_service.engine.sglang.process import ChildProcess
from rollout_service.engine.vllm.core.process import without_collections
from rollout_service.engine.vllm.environment import prepare_environment
from rollout_service.engine.vllm.features import ENGINE, Feature, check_features
from rollout_service.engine.vllm.objects import ServingClient

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

log = logging.getLogger(__name__)

CORE, PARAMS = "vllm.v1.engine", "vllm.sampling_params"
NEEDED = (
    Feature(ENGINE, "AsyncLLM.from_engine_args"),
    Feature(ENGINE, "AsyncLLM.generate", ("prompt", "sampling_params", "request_id")),
    Feature(ENGINE, "AsyncLLM.abort", ("request_id",)),
    Feature(ENGINE, "EngineCoreClient.make_async_mp_client"),
    Feature(CORE, "EngineCoreRequest", ("request_id", "prompt_token_ids", "sampling_params")),
    Feature(CORE, "EngineCoreOutput", ("new_token_ids", "new_logprobs", "finish_reason", "stop_reason")),
    Feature(CORE, "EngineCoreOutputs", ("outputs", "weight_version")),
    Feature("vllm.v1.outputs", "LogprobsLists.slice_request", ("req_idx", "num_positions")),
    Feature(PARAMS, "SamplingParams.all_stop_token_ids"),
    Feature(PARAMS, "SamplingParams.eos_token_id"),
)


def open_front_end(model: str, dtype: str, max_model_tokens: int, child: ChildProcess) -> ServingClient:
    """Return vLLM's `AsyncLLM` with `child` in the place of its engine core.

    Raises:
        EngineError: vLLM is not there, lacks something, or does not know the model.
    """
    prepare_environment(has_gpu=False)
    with without_collections():
        check_features(NEEDED)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import async_llm

    arguments = AsyncEngineArgs(
        model=model,
        dtype=dtype,
        max_model_len=max_model_tokens,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    starter = async_llm.EngineCoreClient
    async_llm.EngineCoreClient = _Seat(child)
    try:
        client: ServingClient = async_llm.AsyncLLM.from_engine_args(arguments)
    except (ValueError, RuntimeError, OSError) as error:
        what = f"the gateway cannot serve {model} with vLLM's front end: {type(error).__name__}: {error}"
        raise EngineError(what) from error
    finally:
        async_llm.EngineCoreClient = starter
    return client


class _Seat:
    """Stands where vLLM's front end starts its engine core."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child

    def make_async_mp_client(self, **_: object) -> SglangCore:
        return SglangCore(self._child)


class SglangCore:
    """The part of vLLM's `EngineCoreClient` that `AsyncLLM` calls to generate."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._outputs: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        self._numbers: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def resources(self) -> SglangCore:
        """What tells whether the engine is dead: itself."""
        return self

    @property
    def engine_dead(self) -> bool:
        return self._child.death is not None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a request; it is with the child on return, so that its abort comes behind it."""
        ask = _ask(self._child.new_number(), request)
        self._numbers[request.request_id] = ask.number
        task = asyncio.create_task(self._run(request, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.sleep(0)

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """End requests; those that have ended are left out."""
        numbers = [self._numbers[name] for name in request_ids if name in self._numbers]
        if numbers and not self.engine_dead:
            self._child.tell(Abort(self._child.new_number(), numbers))

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return what came next. Raises EngineDeadError once the child is gone."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if (outputs := await self._outputs.get()) is None:
            raise EngineDeadError()
        return outputs

    def shutdown(self, timeout: float | None = None) -> None:
        """Leave the child to the adapter."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, request: EngineCoreRequest, ask: Generate) -> None:
        take = partial(self._put, request)
        try:
            take(await self._child.ask(ask, f"request {request.request_id}", take=take))
        except EngineDied:
            self._outputs.put_nowait(None)
        except EngineError as error:
            log.warning("%s", error)
            take(Generated(ask.number, b"", b"", [], "error"))
        finally:
            del self._numbers[request.request_id]

    def _put(self, request: EngineCoreRequest, answer: object) -> None:
        assert isinstance(answer, Generated)
        for outputs in _outputs_of(request, answer):
            self._outputs.put_nowait(outputs)


def _ask(number: int, request: EngineCoreRequest) -> Generate:
    """Return the child's request; stop strings stay with vLLM's detokenizer, which aborts at their end."""
    params: SamplingParams = request.sampling_params
    return Generate(
        number=number,
        prompt_ids=np.asarray(request.prompt_token_ids, np.int32).tobytes(),
        temperature=params.temperature,
        max_tokens=params.max_tokens,
        seed=params.seed,
        ignores_eos=params.ignore_eos,
        stop_ids=sorted(params.all_stop_token_ids),
        stop=[],
        is_streamed=True,
        num_top=params.logprobs or 0,
    )


def _outputs_of(request: EngineCoreRequest, answer: Generated) -> Iterator[EngineCoreOutputs]:
    """Yield the tokens under each version as the core's output, the last one with the end."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists

    ids_T = np.frombuffer(answer.token_ids, np.int32)
    logprobs_T = np.frombuffer(answer.logprobs, np.float32)
    spans: list[tuple[int | None, int, int]] = [*answer.spans] or [(None, 0, 0)]
    end = answer.finish_reason
    if not len(ids_T) == len(logprobs_T) == spans[-1][2]:
        log.warning("SGLang gave no version or log-prob for each token of request %s", request.request_id)
        ids_T, spans, end = ids_T[:0], [(None, 0, 0)], "error"
    lists = LogprobsLists(
        np.column_stack([ids_T, np.frombuffer(answer.top_ids, np.int32).reshape(len(ids_T), -1)]),
        np.column_stack([logprobs_T, np.frombuffer(answer.top_logprobs, np.float32).reshape(len(ids_T), -1)]),
        np.zeros(len(ids_T), np.int32),  # of the sampled token's rank nothing is shown
    ) if len(ids_T) else None  # fmt: skip
    for version, start, stop in spans:
        output: EngineCoreOutput = EngineCoreOutput(
            request.request_id,
            ids_T[start:stop].tolist(),
            lists.slice_request(start, stop - start) if stop > start and lists else None,
        )
        if end and stop == spans[-1][2]:
            output.finish_reason = FinishReason[end.upper()]
            output.stop_reason = _stop_reason(request.sampling_params, output)
        yield EngineCoreOutputs(outputs=[output], weight_version=None if version is None else str(version))


def _stop_reason(params: SamplingParams, output: EngineCoreOutput) -> int | None:
    """Return the client's stop token that ended the answer, as vLLM's own core tells it."""
    last = output.new_token_ids[-1] if output.new_token_ids else None
    return last if last != params.eos_token_id and last in (params.stop_token_ids or ()) else None
