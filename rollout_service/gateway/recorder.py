"""vLLM's engine as its serving classes see it: each answer is recorded on its way to the client.

Owns the step between a rendered prompt and the engine: recorded tokens take the place of the text that
stands for them, parameters become the run's, and what the engine sampled is kept with its log-probs and
versions. Must never offer more of the engine than serving needs: no pause, no weights, no other calls.
Invariant: what a session records is what the engine was given and what it sampled, token by token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol, TypedDict

from asyncrl.core.staleness import Span
from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.vllm.objects import (
    AskedSampling,
    CompletionOutput,
    RequestOutput,
    ServingClient,
    TokenPrompt,
)
from rollout_service.gateway.history import Step
from rollout_service.gateway.refusal import Refusal
from rollout_service.gateway.rules import sampling_params
from rollout_service.gateway.sessions import Call, SessionManager
from rollout_service.gateway.transcript import Turn


class RenderedPrompt(TypedDict):
    """Prompt that vLLM makes of a request: the text that a template gave, and its ids."""

    prompt: str
    prompt_token_ids: list[int]


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
        llm: The `AsyncLLM`.
        salt: Returns what keeps prefixes of other versions apart, None where none are cached.
    """

    def __init__(
        self, llm: ServingClient, manager: SessionManager, meter: Meter, salt: Callable[[], str | None]
    ) -> None:
        self._llm = llm
        self._manager = manager
        self._meter = meter
        self._salt = salt
        self._serial = 0
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
        self,
        prompt: RenderedPrompt,
        asked: AskedSampling,
        request_id: str,
        *,
        session_id: str | None = None,
        **_: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return the outputs of the call that session `session_id` has in flight.

        What else a client may bring along (priorities, ranks, adapters) goes no further.

        Raises:
            Refusal: Before anything is generated: the session has ended, or the prompt has no room.
        """
        call = self._manager.call_of(session_id)
        prompt_ids = self._prompt_ids(call, prompt)
        params = self._params(call, prompt_ids, asked)
        self._serial += 1
        call.request_id = f"{call.session.id}.{len(call.session.transcript.answers)}.{self._serial}"
        return self._outputs(call, prompt_ids, params)

    async def _outputs(
        self, call: Call, prompt_ids: tuple[int, ...], params: object
    ) -> AsyncGenerator[RequestOutput, None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = TokenPrompt(type="token", prompt_token_ids=list(prompt_ids))
        if (salt := self._salt()) is not None:
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
            ended.status_code = HTTPStatus.GONE
            raise ended
        self._meter.num_completions += 1
        self._manager.counters["calls"] += 1
        spans = tuple(Span(int(span.version), span.start, span.end) for span in last.weight_versions)
        answers = (tuple(answer.token_ids), tuple(answer.logprobs))
        stop = last.stop_reason if isinstance(last.stop_reason, str) else ""
        call.session.record(call, Turn(prompt_ids, *answers, spans, last.finish_reason, answer.text, stop))

    # What the engine is given

    def _prompt_ids(self, call: Call, prompt: RenderedPrompt) -> tuple[int, ...]:
        """Return the ids of the call's prompt, those of earlier turns as they were sampled."""
        transcript = call.session.transcript
        if call.step is Step.FIRST:
            return tuple(prompt["prompt_token_ids"])
        if call.step is Step.AGAIN:
            return transcript.last_prompt
        if call.asked.kind == "ids":
            return call.asked.ids
        before = transcript.ids
        return before + self._observe(self._new_text(call, prompt), before[-1])

    def _new_text(self, call: Call, prompt: RenderedPrompt) -> str:
        """Return what follows the recorded answer in the rendered prompt."""
        if call.asked.kind == "text":
            assert call.session.before is not None
            transcript = call.session.transcript
            new_text = call.asked.content[0].removeprefix(
                call.session.before.content[0] + transcript.last_text
            )
            return new_text.removeprefix(transcript.last_stop)  # sampled: the recorded ids hold it
        parts = prompt["prompt"].split(call.marker)
        if len(parts) != 2:
            raise Refusal(
                f"the chat template shows an answer {len(parts) - 1} times in the next prompt, not once",
                hint="Use completions with this model, or another template",
                code="template",
            )
        return parts[1]

    def _observe(self, text: str, last_id: int) -> tuple[int, ...]:
        """Return the ids of new text; the end of the answer is left out where the model sampled it itself."""
        tokenizer = self.renderer.tokenizer
        if last_id in tokenizer.all_special_ids:
            text = text.removeprefix(tokenizer.decode([last_id]))
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _params(self, call: Call, prompt_ids: Sequence[int], asked: AskedSampling) -> object:
        rules, transcript = self._manager.rules, call.session.transcript
        num_first = len(transcript.first_prompt if transcript.answers else prompt_ids)
        if num_first > rules.max_prompt_tokens:
            raise Refusal(
                f"the prompt has {num_first} tokens, over data.max_prompt_tokens ({rules.max_prompt_tokens})",
                code="context_length_exceeded",
            )
        room = rules.max_tokens - (len(prompt_ids) - num_first)
        if room < 1 or not prompt_ids:
            raise Refusal(
                f"the session has no room left: {rules.max_tokens} tokens after its first prompt",
                hint="Post its reward, or raise rollout.max_tokens",
                code="context_length_exceeded",
            )
        seed = call.session.seed(rules.run_seed, call.step)
        return sampling_params(asked, rules, seed, min(call.max_tokens or room, room))
