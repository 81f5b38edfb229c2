"""vLLM's serving classes over the recorder: what they render and what they answer is a session's.

    a request -> RecordedRenderer: the recorded ids, then the template's text for what is new
    the engine's outputs -> the serving class with its parsers -> `Call.answered` -> the client

Owns the places in vLLM where a conversation comes in as messages, of any API, and goes out as one. Invariant:
a recorded answer is never tokenised again, whatever a parser made of it and however the client sends it back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextvars import ContextVar

import msgspec
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_input_messages
from vllm.renderers.online_renderer import OnlineRenderer

from asyncrl.core.errors import ConfigError
from rollout_service.gateway.conversation.history import Step, asked_in_chat, asked_in_completion
from rollout_service.gateway.conversation.session import Call
from rollout_service.gateway.parsers import Parsers
from rollout_service.gateway.recorder import Recorder, RenderedPrompt
from rollout_service.gateway.refusal import Refusal
from rollout_service.gateway.rules import Rules, room_of
from rollout_service.gateway.serving.reading import adapt

MODEL = "policy"
"""Name of the model that clients read; they may ask for it by any."""
CALL: ContextVar[Call | None] = ContextVar("call", default=None)
"""The call whose request vLLM handles in this task; None for what has no answer, as a count of tokens."""
FRAME = ("chat_template_kwargs", "documents", "reasoning_effort", "reasoning")
"""Fields of a request that change how the template renders a conversation."""


class RecordedRenderer(OnlineRenderer):
    """Renders the prompts of sessions from their recorded ids."""

    def __init__(self, rules: Rules, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)
        self._rules = rules

    async def preprocess_chat(
        self,
        request: object,
        messages: list[Mapping[str, object]],
        *args: object,
        tool_dicts: list[object] | None = None,
        **more: object,
    ) -> tuple[object, list[RenderedPrompt]]:
        """Render a conversation of any API, by now chat messages.

        Raises:
            Refusal: It holds more than text, does not go on from the recorded one, or has no room.
        """
        call = CALL.get()
        more["tool_dicts"] = tool_dicts
        try:
            if call is not None:
                frame = {name: value for name in FRAME if (value := getattr(request, name, None))}
                call.ask(asked_in_chat(messages, {"tools": tool_dicts or None, **frame}))
                messages = _with_marker(messages, call)
            conversation, prompts = await super().preprocess_chat(request, messages, *args, **more)
            return conversation, prompts if call is None else [self._record(call, *prompts)]
        except Refusal as refusal:
            assert call is not None, "only calls are refused"
            call.refusal = refusal
            raise

    async def preprocess_completion(
        self, request: object, prompt_input: object, *args: object, **more: object
    ) -> list[RenderedPrompt]:
        """Render a completion's prompt. Raises Refusal as `preprocess_chat` does."""
        call = CALL.get()
        assert call is not None, "only calls complete a prompt"
        try:
            call.ask(asked_in_completion(prompt_input))
            prompts = await super().preprocess_completion(request, prompt_input, *args, **more)
            return [self._record(call, *prompts)]
        except Refusal as refusal:
            call.refusal = refusal
            raise

    def _record(self, call: Call, prompt: RenderedPrompt) -> RenderedPrompt:
        """Put the recorded ids in the place of the text that stands for them."""
        ids = self._prompt_ids(call, prompt)
        call.room = room_of(self._rules, call.branch.transcript, ids)
        return {**prompt, "prompt_token_ids": list(ids), "call": call}

    def _prompt_ids(self, call: Call, prompt: RenderedPrompt) -> tuple[int, ...]:
        """Return the ids of the call's prompt, those of earlier turns as they were sampled."""
        transcript = call.branch.transcript
        assert call.asked is not None, "it has asked"
        if call.step is Step.FIRST:
            return tuple(prompt["prompt_token_ids"])
        if call.step is Step.AGAIN:
            call.num_recorded = transcript.answers[-2].end if len(transcript.answers) > 1 else 0
            return transcript.last_prompt
        call.num_recorded = len(transcript.ids)
        if call.asked.kind == "ids":
            return call.asked.ids
        before = transcript.ids
        return before + self._observe(_new_text(call, prompt), before[-1])

    def _observe(self, text: str, last_id: int) -> tuple[int, ...]:
        """Return the ids of new text; the end of the answer is left out where the model sampled it itself."""
        tokenizer = self.renderer.tokenizer
        if last_id in tokenizer.all_special_ids:
            text = text.removeprefix(tokenizer.decode([last_id]))
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_marker(messages: list[Mapping[str, object]], call: Call) -> list[Mapping[str, object]]:
    """Return the messages with the call's marker in place of the recorded answer."""
    if call.step is not Step.NEXT:
        return messages
    assert call.added is not None, "it has asked"
    end = len(messages) - len(call.added.messages)
    place = end - len(call.branch.told[-1].reply.messages)
    return [*messages[:place], {"role": "assistant", "content": call.marker}, *messages[end:]]


def _new_text(call: Call, prompt: RenderedPrompt) -> str:
    """Return what follows the recorded answer in the rendered prompt."""
    assert call.added is not None, "it has asked"
    if call.added.kind == "text":
        stop = call.branch.transcript.last_stop  # sampled: the recorded ids hold it
        return call.added.text.removeprefix(stop)
    parts = prompt.get("prompt", "").split(call.marker)
    if len(parts) != 2:
        raise Refusal(
            f"the chat template shows an answer {len(parts) - 1} times in the next prompt, not once",
            hint="Use completions with this model, or another template",
            code="template",
        )
    return parts[1]


class RecordedChat(OpenAIServingChat):
    """Chat completions whose answers their sessions keep as the client gets them."""

    async def chat_completion_full_generator(self, *args: object, **more: object) -> object:
        response = await super().chat_completion_full_generator(*args, **more)
        if (call := CALL.get()) is not None and hasattr(response, "choices"):
            call.answered([response.choices[0].message.model_dump()])
        return response

    def chat_completion_stream_generator(self, *args: object, **more: object) -> AsyncGenerator[str, None]:
        return _keep_chunks(super().chat_completion_stream_generator(*args, **more), CALL.get())


class RecordedMessages(RecordedChat, AnthropicServingMessages):
    """Anthropic's messages: vLLM makes a chat of each request, and of the chat's answer the message."""


class RecordedResponses(OpenAIServingResponses):
    """Responses whose output their sessions keep."""

    async def responses_full_generator(self, *args: object, **more: object) -> object:
        response = await super().responses_full_generator(*args, **more)
        if (call := CALL.get()) is not None and hasattr(response, "output"):
            call.answered(_as_messages(response.output))
        return response

    def responses_stream_generator(self, *args: object, **more: object) -> AsyncGenerator[object, None]:
        return _keep_events(super().responses_stream_generator(*args, **more), CALL.get())


def _as_messages(output: list[object]) -> list[Mapping[str, object]]:
    """Return the chat messages that vLLM makes of a response's output once it comes back as input."""
    messages: list[Mapping[str, object]] = construct_input_messages(request_input=list(output))
    return messages


async def _keep_events(events: AsyncIterator[object], call: Call | None) -> AsyncGenerator[object, None]:
    CALL.set(call)  # a stream runs in a context of its own
    async for event in events:
        if call is not None and getattr(event, "type", "") == "response.completed":
            call.answered(_as_messages(event.response.output))  # type: ignore[attr-defined]
        yield event


async def _keep_chunks(chunks: AsyncIterator[str], call: Call | None) -> AsyncGenerator[str, None]:
    """Pass a chat's stream on; keep the message that it makes before its last part goes out."""
    CALL.set(call)
    message = StreamedMessage()
    async for chunk in chunks:
        data = chunk.removeprefix("data:").strip()
        choices = msgspec.json.decode(data).get("choices") if data.startswith("{") else None
        if choices:
            message.add(choices[0].get("delta") or {})
            if call is not None and choices[0].get("finish_reason"):
                call.answered([message.whole()])
        yield chunk


class StreamedMessage:
    """An assistant's message, as a client puts it together from the parts of a stream."""

    def __init__(self) -> None:
        self._texts = {"content": "", "reasoning": ""}
        self._calls: dict[int, dict[str, str]] = {}

    def add(self, delta: Mapping[str, object]) -> None:
        for name in self._texts:
            self._texts[name] += str(delta.get(name) or "")
        calls = delta.get("tool_calls")
        for part in calls if isinstance(calls, list) else ():
            call = self._calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
            function = part.get("function") or {}
            call["id"] = call["id"] or part.get("id") or ""
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def whole(self) -> Mapping[str, object]:
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for _, call in sorted(self._calls.items())
        ]
        return {"role": "assistant", **self._texts, "tool_calls": calls}


def build_serving(client: Recorder, rules: Rules, parsers: Parsers) -> dict[str, object]:
    """Return vLLM's serving objects by the names under which its handlers look for them.

    Raises:
        ConfigError: vLLM has no such parser, or it does not fit the model's tokenizer.
    """
    models = OpenAIServingModels(client, [BaseModelPath(name=MODEL, model_path=MODEL)])
    template: dict[str, object] = {"chat_template": None, "chat_template_content_format": "auto"}
    parsing: dict[str, object] = {
        "enable_auto_tools": parsers.tools is not None,
        "tool_parser": parsers.tools,
        "reasoning_parser": parsers.reasoning or "",
    }
    try:
        renderer = RecordedRenderer(
            rules, client.model_config, client.renderer, request_logger=None, **template, **parsing
        )
    except TypeError as error:
        hint = "rollout.gateway.tool_call_parser and reasoning_parser are names of vLLM's parsers"
        raise ConfigError(f"the gateway cannot parse answers: {error}", hint=hint) from error
    common: dict[str, object] = {"online_renderer": renderer, "request_logger": None}
    chat = {**common, **template, **parsing}
    responses = RecordedResponses(client, models, **chat)
    responses.enable_store = False  # else it would keep the answers of all sessions for any that names them
    handlers = {
        "openai_serving_chat": RecordedChat(client, models, "assistant", **chat),
        "openai_serving_completion": OpenAIServingCompletion(client, models, **common),
        "openai_serving_responses": responses,
        "anthropic_serving_messages": RecordedMessages(client, models, "assistant", **chat),
    }
    for handler in handlers.values():
        handler.default_sampling_params = {}  # the model's generation_config.json has no say
    for handler in (renderer, *handlers.values()):
        for name in ("parser_cls", "parser"):  # of chats; of responses and of requests
            if (parser := getattr(handler, name, None)) is not None:
                setattr(handler, name, adapt(parser, client.counters, CALL.get))
    return {"openai_serving_models": models, **handlers}
