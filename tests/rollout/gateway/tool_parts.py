"""A stage whose model calls tools, and clients of each API that have a recorded conversation with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
from transformers import Qwen2ForCausalLM

from tests.rollout.gateway.gateway_parts import CALL_S, Agent, Served, Stage, open_gateway_stage
from tests.rollout.gateway.tool_model import Transcript, make_tool_model


@dataclass(frozen=True)
class Tool:
    """A tool with one argument; `run` gets it and the recorded result, and returns the result."""

    name: str
    argument: str
    run: Callable[[str, str], str]

    @property
    def schema(self) -> dict[str, Any]:
        kinds = {self.argument: {"type": "string"}}
        return {"type": "object", "properties": kinds, "required": [self.argument]}

    def of_chats(self) -> list[Any]:
        return [{"type": "function", "function": {"name": self.name, "parameters": self.schema}}]

    def of_responses(self) -> list[Any]:
        return [{"type": "function", "name": self.name, "parameters": self.schema, "strict": False}]

    def of_messages(self) -> list[Any]:
        return [{"name": self.name, "input_schema": self.schema}]


def tell_weather(city: str, recorded: str) -> str:
    assert city in ("Paris", "Rome")
    return recorded


WEATHER = Tool("weather", "city", tell_weather)
SCHEMA, CHAT_TOOLS = WEATHER.schema, WEATHER.of_chats()
RESPONSE_TOOLS, MESSAGE_TOOLS = WEATHER.of_responses(), WEATHER.of_messages()
SYSTEM = "You are a helpful assistant."


def load_model(folder: Path, seed: int, ends: bool) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(folder).eval()


@contextlib.contextmanager
def open_tool_stage(folder: Path, family: str, engine: str = "vllm") -> Iterator[Stage]:
    """A stage with the model of a parser family, for prompts of 12 k tokens."""
    parsers = {"tool_call_parser": family, "reasoning_parser": "qwen3"}
    make = partial(make_tool_model, family=family)
    served = Served(make, load_model, 12_000, 8_000, parsers, engine)
    with open_gateway_stage(folder, 300.0, served) as stage:
        yield stage


def play_chat(agent: Agent, transcript: Transcript, is_streamed: bool, tool: Tool = WEATHER) -> list[str]:
    """Have the transcript's conversation over chat completions; return what was said.

    A call that has no recorded result ends it.
    """
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": transcript.question},
    ]
    said = []
    for results in [*transcript.results, ()]:
        asked = {"model": "any", "messages": messages, "tools": tool.of_chats()}
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
        assert not results or len(calls) == len(results)
        for call, recorded in zip(calls, results, strict=False):
            result = tool.run(json.loads(call.function.arguments)[tool.argument], recorded)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return said


def play_responses(
    agent: Agent, transcript: Transcript, is_streamed: bool, tool: Tool = WEATHER
) -> list[str]:
    """Have it over the Responses API."""
    items: list[Any] = [{"role": "user", "content": transcript.question}]
    said = []
    for results in [*transcript.results, ()]:
        asked: Any = {"model": "any", "instructions": SYSTEM, "input": items, "tools": tool.of_responses()}
        if is_streamed:
            with agent.client.responses.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = agent.client.responses.create(**asked)
        said.append(response.output_text)
        calls = [item for item in response.output if item.type == "function_call"]
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
        assert not results or len(calls) == len(results)
        for call, recorded in zip(calls, results, strict=False):
            result = tool.run(json.loads(call.arguments)[tool.argument], recorded)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    return said


def play_messages(agent: Agent, transcript: Transcript, is_streamed: bool, tool: Tool = WEATHER) -> list[str]:
    """Have it over Anthropic's messages."""
    base_url = agent.session["anthropic_base_url"]
    client = anthropic.Anthropic(base_url=base_url, api_key="unknown", max_retries=0, timeout=CALL_S)
    messages: list[Any] = [{"role": "user", "content": transcript.question}]
    said = []
    for results in [*transcript.results, ()]:
        asked: Any = {"model": "any", "system": SYSTEM, "messages": messages, "tools": tool.of_messages()}
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
        assert not results or len(calls) == len(results)
        for call, recorded in zip(calls, results, strict=False):
            result = tool.run(call.input[tool.argument], recorded)
            found.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
        messages.append({"role": "user", "content": found})
    return said


PLAYERS: dict[str, Callable[..., list[str]]] = {
    "chat": play_chat,
    "responses": play_responses,
    "messages": play_messages,
}
