"""A stage whose model calls tools, and clients of each API that have a recorded conversation with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
from transformers import Qwen3ForCausalLM

from tests.rollout.gateway.gateway_parts import CALL_S, Agent, Served, Stage, open_gateway_stage
from tests.rollout.gateway.tool_model import Transcript, make_tool_model

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
MESSAGE_TOOLS: list[Any] = [{"name": "weather", "input_schema": SCHEMA}]
SYSTEM = "You are a helpful assistant."


def load_model(folder: Path, seed: int, ends: bool) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder).eval()


@contextlib.contextmanager
def open_tool_stage(folder: Path, family: str) -> Iterator[Stage]:
    """A stage with the model of a parser family, for prompts of 12 k tokens."""
    parsers = {"tool_call_parser": family, "reasoning_parser": "qwen3"}
    make = partial(make_tool_model, family=family)
    served = Served(make, load_model, 12_000, 8_000, parsers)
    with open_gateway_stage(folder, 300.0, served) as stage:
        yield stage


def play_chat(agent: Agent, transcript: Transcript, is_streamed: bool, **more: Any) -> list[str]:
    """Have the transcript's conversation over chat completions; return what was said."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": transcript.question},
    ]
    said = []
    for results in [*transcript.results, ()]:
        asked = {"model": "any", "messages": messages, "tools": CHAT_TOOLS, **more}
        if is_streamed:
            with agent.client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = agent.client.chat.completions.create(**asked).choices[0].message
        said.append(message.content or "")
        calls = message.tool_calls or []
        told = message.model_dump(exclude_none=True, exclude={"parsed"})
        for call in told.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
        messages.append(told)
        for call, result in zip(calls, results, strict=True):
            assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return said


def play_responses(agent: Agent, transcript: Transcript, is_streamed: bool) -> list[str]:
    """Have it over the Responses API."""
    items: list[Any] = [{"role": "user", "content": transcript.question}]
    said = []
    for results in [*transcript.results, ()]:
        asked: Any = {"model": "any", "instructions": SYSTEM, "input": items, "tools": RESPONSE_TOOLS}
        if is_streamed:
            with agent.client.responses.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = agent.client.responses.create(**asked)
        said.append(response.output_text)
        calls = [item for item in response.output if item.type == "function_call"]
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
        for call, result in zip(calls, results, strict=True):
            assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return said


def play_messages(agent: Agent, transcript: Transcript, is_streamed: bool) -> list[str]:
    """Have it over Anthropic's messages."""
    base_url = agent.session["anthropic_base_url"]
    client = anthropic.Anthropic(base_url=base_url, api_key="unknown", max_retries=0, timeout=CALL_S)
    messages: list[Any] = [{"role": "user", "content": transcript.question}]
    said = []
    for results in [*transcript.results, ()]:
        asked: Any = {"model": "any", "system": SYSTEM, "messages": messages, "tools": MESSAGE_TOOLS}
        counted = client.messages.count_tokens(**asked).input_tokens
        if is_streamed:
            with client.messages.stream(max_tokens=2000, **asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(max_tokens=2000, **asked)
        assert len(messages) > 1 or counted == message.usage.input_tokens
        said.append("".join(block.text for block in message.content if block.type == "text"))
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        found = []
        for call, result in zip(calls, results, strict=True):
            assert call.input["city"] in ("Paris", "Rome")
            found.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
        messages.append({"role": "user", "content": found})
    return said


PLAYERS: dict[str, Callable[[Agent, Transcript, bool], list[str]]] = {
    "chat": play_chat,
    "responses": play_responses,
    "messages": play_messages,
}
