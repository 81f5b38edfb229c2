"""vLLM's engine as its serving classes see it: each answer is recorded on its way to the client.

Owns the step between a prompt and the engine: parameters become the run's, and what the engine sampled is
kept with its log-probs and versions.
Must never offer more of the engine than serving needs: no pause, no weights, no other calls.
Invariant: what a session records is what the engine was given and what it sampled, token by token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, NotRequired, Protocol, TypedDict

from asyncrl.core.staleness import Span
from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.vllm.objects import (
    AskedSampling,
    CompletionOutput,
    RequestOutput,
    ServingClient,
    TokenPrompt,
)
from rollout_service.gateway.conversation.session import Call
from rollout_service.gateway.conversation.transcript import Turn
from rollout_service.gateway.refusal import Refusal
from rollout_service.gateway.rules import sampling_params
from rollout_service.gateway.sessions import SessionManager

if TYPE_CHECKING:
    from asyncrl.core.experts import Rows


class RenderedPrompt(TypedDict):
    """Prompt that vLLM makes of a request: the text that a template gave, and its ids; and whose it is."""

    prompt: NotRequired[str]
    prompt_token_ids: list[int]
    call: NotRequired[Call]


class Llm(Protocol):
    """Interface that the gateway needs of `VllmEngine` and `SglangEngine`."""

    @property
    def client(self) -> ServingClient: ...

    def cache_salt(self) -> str | None: ...

    def experts_of(self, completion: CompletionOutput) -> Rows | None: ...

    def death(self) -> EngineDied: ...


class Meter(Protocol):
    """Counts what the engine does (`MeteredEngine`)."""

    num_tokens: int
    num_completions: int

    def request(self) -> AbstractContextManager[None]: ...


@dataclass
class _Answer:
    """Tokens of an answer so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""

    def add(self, output: CompletionOutput) -> None:
        ids = list(output.token_ids)
        self.logprobs += [at[token].logprob for at, token in zip(output.logprobs or (), ids, strict=True)]
        self.token_ids += ids
        self.text += output.text


class Recorder:
    """The part of vLLM's `EngineClient` that serving calls; `generate` records.

    Args:
        engine: Started; its client is the `AsyncLLM`.
    """

    def __init__(self, engine: Llm, manager: SessionManager, meter: Meter) -> None:
        self._engine = engine
        self._llm = llm = engine.client
        self._manager = manager
        self._meter = meter
        self._serial = 0
        self.counters = manager.counters
        self.model_config = llm.model_config
        self.vllm_config = llm.vllm_config
        self.renderer = llm.renderer
        self.input_processor = llm.input_processor

    @property
    def errored(self) -> bool:
        return bool(self._llm.errored)

    @property
    def dead_error(self) -> BaseException:
        return self._llm.dead_error

    def check_admission(self, n: int = 1) -> None:
        """Raise if vLLM's queue is full."""
        self._llm.check_admission(n)

    def generate(
        self, prompt: RenderedPrompt, asked: AskedSampling, request_id: str, **_: object
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the outputs of the call that the prompt was rendered for (`RecordedRenderer`).

        What else a client may bring along (priorities, ranks, adapters) goes no further.

        Raises:
            Refusal: The prompt is that of no call: vLLM renders this model's chats without a template.
        """
        call = prompt.get("call")
        if call is None:
            raise Refusal("chats with this model are not made by a template", hint="Use completions")
        rules, branch = self._manager.rules, call.branch
        seed = call.seed(rules.run_seed)
        params = sampling_params(asked, rules, seed, min(asked.max_tokens or call.room, call.room))
        self._serial += 1
        call.request_id = f"{call.session.id}.{branch.number}.{len(branch.told)}.{self._serial}"
        return self._outputs(call, tuple(prompt["prompt_token_ids"]), params)

    async def _outputs(
        self, call: Call, prompt_ids: tuple[int, ...], params: object
    ) -> AsyncGenerator[RequestOutput, None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = TokenPrompt(type="token", prompt_token_ids=list(prompt_ids))
        if (salt := self._engine.cache_salt()) is not None:
            prompt["cache_salt"] = salt
        answer = _Answer()
        try:
            with self._meter.request():
                async for output in self._llm.generate(prompt, params, call.request_id):
                    answer.add(output.outputs[0])
                    if output.finished:
                        self._finish(call, prompt_ids, answer, output.outputs[0])
                    yield output
        except EngineDeadError as error:
            self._manager.fail_all(EngineDied(f"vLLM died: {error}"))
            raise

    def _finish(
        self, call: Call, prompt_ids: tuple[int, ...], answer: _Answer, last: CompletionOutput
    ) -> None:
        """Record a finished answer, before the client sees its end."""
        from vllm.exceptions import GenerationError

        self._meter.num_tokens += len(answer.token_ids)
        if (
            last.finish_reason not in ("stop", "length")
            or not answer.token_ids
            or last.weight_versions is None
        ):
            self._manager.counters["calls_ended"] += 1
            ended = GenerationError(f"the call was ended: {self._manager.why_ended(call.session)}")
            is_to_return = self._manager.is_to_return
            ended.status_code = HTTPStatus.SERVICE_UNAVAILABLE if is_to_return else HTTPStatus.GONE
            raise ended
        self._meter.num_completions += 1
        self._manager.counters["calls"] += 1
        spans = tuple(Span(int(span.version), span.start, span.end) for span in last.weight_versions)
        answers = (tuple(answer.token_ids), tuple(answer.logprobs))
        stop = last.stop_reason if isinstance(last.stop_reason, str) else ""
        experts = self._engine.experts_of(last)
        call.record(Turn(prompt_ids, *answers, spans, last.finish_reason, answer.text, stop, experts))
