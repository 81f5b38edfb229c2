"""The gateway beside vLLM's own server: the same requests have the same statuses and shapes of answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rollout.gateway.gateway_parts import CALL_S, Stage
from tests.rollout.gateway.tool_parts import (
    CHAT_TOOLS,
    MESSAGE_TOOLS,
    RESPONSE_TOOLS,
    SCHEMA,
    SYSTEM,
    open_tool_stage,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.long

FAMILY = "hermes"
HELLO = {"role": "user", "content": "Say hello."}
PARIS = {"role": "user", "content": "How is the weather in Paris?"}
TWICE = {"role": "user", "content": "Compare Paris and Rome."}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLED = [
    PARIS,
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
USED = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
CHATS: list[dict[str, Any]] = [
    {"messages": [HELLO]},
    {"messages": [{"role": "system", "content": SYSTEM}, HELLO], "temperature": 0.2, "top_p": 0.9, "seed": 3},
    {"messages": [HELLO], "n": 2, "presence_penalty": 0.5, "frequency_penalty": 0.1, "user": "me"},
    {"messages": [HELLO], "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {"messages": [HELLO], "max_tokens": 3},
    {"messages": [HELLO], "stop": ["o"], "logit_bias": {"5": 1}, "min_tokens": 1},
    {"messages": [PARIS], "tools": CHAT_TOOLS},
    {"messages": [PARIS], "tools": CHAT_TOOLS, "tool_choice": "none"},
    {"messages": [TWICE], "tools": CHAT_TOOLS, "parallel_tool_calls": False},
    {"messages": CALLED, "tools": CHAT_TOOLS},
    {"messages": [HELLO], "a_new_field": {"of": "tomorrow"}, "metadata": {"a": "b"}, "store": True},
    {"messages": [HELLO], "reasoning_effort": "low", "include_reasoning": False},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
    {},
    {"messages": "Say hello."},
    {"messages": [{"content": "no role"}]},
    {"messages": [HELLO], "temperature": "hot"},
    {"messages": [HELLO], "tool_choice": NAMED},
    {"messages": [HELLO], "stream_options": {"include_usage": True}},
    {"messages": [HELLO], "max_tokens": 10**9},
    {"messages": [{"role": "user", "content": "a" * 30_000}]},
]
STREAMED_CHATS: list[dict[str, Any]] = [
    {"messages": [HELLO]},
    {"messages": [HELLO], "stream_options": {"include_usage": True}, "temperature": 0},
    {"messages": [TWICE], "tools": CHAT_TOOLS},
    {"messages": CALLED, "tools": CHAT_TOOLS, "tool_choice": "auto"},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "Say hello.", "max_tokens": 5},
    {"prompt": ["Say hello."], "max_tokens": 5, "logprobs": 1, "best_of": 1},
    {"prompt": [5, 6, 7], "max_tokens": 5, "stream": True},
    {"prompt": "Say hello.", "max_tokens": 5, "echo": True, "temperature": 0.1},
    {},
    {"prompt": 5},
]
RESPONSES: list[dict[str, Any]] = [
    {"input": "Say hello."},
    {"input": [HELLO], "instructions": SYSTEM, "temperature": 0.3, "max_output_tokens": 200, "store": True},
    {"input": [PARIS], "tools": RESPONSE_TOOLS, "parallel_tool_calls": True},
    {"input": [HELLO], "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"input": [HELLO], "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "prompt_cache_key": "k"},
    {"input": [HELLO], "max_output_tokens": 3},
    {
        "input": [
            PARIS,
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
        "tools": RESPONSE_TOOLS,
    },
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}]},
    {"input": "Say hello.", "previous_response_id": "resp_1"},
    {"input": "Say hello.", "background": True},
    {"input": "Say hello.", "prompt": {"id": "pmpt_1"}},
    {"input": 5},
    {},
    {"input": "Say hello.", "stream": True},
    {"input": [TWICE], "tools": RESPONSE_TOOLS, "stream": True},
]
MESSAGES: list[dict[str, Any]] = [
    {"messages": [HELLO]},
    {"messages": [HELLO], "system": [{"type": "text", "text": SYSTEM}], "temperature": 0.5, "top_k": 4},
    {"messages": [HELLO], "stop_sequences": ["o"], "metadata": {"user_id": "me"}},
    {"messages": [HELLO], "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
    {"messages": [HELLO], "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    {"messages": [HELLO], "max_tokens": 3},
    {"messages": [PARIS], "tools": MESSAGE_TOOLS},
    {"messages": [PARIS], "tools": MESSAGE_TOOLS, "tool_choice": {"type": "none"}},
    {
        "messages": [
            PARIS,
            {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, USED]},
            {"role": "user", "content": [RESULT]},
        ],
        "tools": MESSAGE_TOOLS,
    },
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": IMAGE}}]}]},
    {"messages": [{"role": "nobody", "content": "hello"}]},
    {"messages": [HELLO], "max_tokens": 0},
    {},
    {"messages": [HELLO], "stream": True},
    {"messages": [TWICE], "tools": MESSAGE_TOOLS, "stream": True},
]
COUNTED: list[dict[str, Any]] = [{"messages": [HELLO]}, {"messages": [PARIS], "tools": MESSAGE_TOOLS}, {}]
REQUESTS = [
    *(("chat/completions", body) for body in CHATS),
    *(("chat/completions", {**body, "stream": True}) for body in STREAMED_CHATS),
    *(("completions", body) for body in COMPLETIONS),
    *(("responses", body) for body in RESPONSES),
    *(("messages", {"max_tokens": 300, **body}) for body in MESSAGES),
    *(("messages/count_tokens", body) for body in COUNTED),
]
FREE_IN_VLLM = [
    ("chat/completions", {"messages": [PARIS], "tools": CHAT_TOOLS, "tool_choice": "required"}),
    ("chat/completions", {"messages": [PARIS], "tools": CHAT_TOOLS, "tool_choice": NAMED}),
    ("chat/completions", {"messages": [HELLO], "response_format": JSON}),
    (
        "responses",
        {"input": [HELLO], "text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}}},
    ),
    (
        "messages",
        {"messages": [PARIS], "tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 99},
    ),
]
"""Requests that bind the answer: vLLM's server keeps to them, the gateway names them in its header."""


@dataclass(frozen=True)
class Both:
    """A stage of the gateway and the URL of vLLM's server, with one model."""

    stage: Stage
    vllm_url: str


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("compared")
    with open_tool_stage(folder, FAMILY) as stage, open_vllm_server(stage.folder, folder / "vllm.log") as url:
        yield Both(stage, url)


@contextlib.contextmanager
def open_vllm_server(model: Path, log: Path) -> Iterator[str]:
    """vLLM's own server of the model, with the parsers of the gateway."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "20000", "--enforce-eager"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", FAMILY, "--reasoning-parser", "qwen3"]
    command += ["--generation-config", "vllm"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(10):
            with contextlib.suppress(AssertionError):
                wait_for(lambda: is_up(url) or server.poll() is not None, "vLLM's server")
                break
        assert is_up(url), log.read_text()[-3000:]
        yield url
    finally:
        server.terminate()
        server.wait(60)


def is_up(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def ask_both(both: Both, path: str, body: dict[str, Any]) -> tuple[httpx.Response, httpx.Response]:
    """Return vLLM's answer and that of a new session."""
    asked = {"model": "policy", **body}
    agent = both.stage.open()
    theirs = httpx.post(f"{both.vllm_url}/v1/{path}", json=asked, timeout=CALL_S)
    ours = both.stage.post(f"/v1/{path}", asked, agent.key)
    both.stage.post("/reward", {"error": "enough seen"}, agent.key)
    return theirs, ours


def shape_of(value: Any) -> Any:
    """Return a value's keys and types; of a list those that its members have."""
    if isinstance(value, dict):
        return {key: shape_of(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(shape_of(inner)) for inner in value})
    return "number" if type(value) in (int, float) else type(value).__name__


def events_of(text: str) -> dict[str, set[str]]:
    """Return the keys of a stream's events, by the events' names, at any depth."""
    found: dict[str, set[str]] = {}
    name = "data"
    for line in text.splitlines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: {"):
            found.setdefault(name, set()).update(paths_of(json.loads(line.removeprefix("data: "))))
        elif line.startswith("data: "):
            found[line] = set()
    return found


def paths_of(value: Any, path: str = "") -> Iterator[str]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else [("[]", one) for one in value]
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield f"{path}.{key}"
        yield from paths_of(one, f"{path}.{key}")


def said_in(text: str) -> list[str]:
    """Return what an answer says and calls, where it says it at once."""
    answer = json.loads(text)
    found = [*answer.get("choices", ())[:1], *answer.get("output", ()), *answer.get("content", ())]
    named = ("name", "arguments", "text", "content", "reasoning", "thinking", "input", "finish_reason")
    return [f"{path}={value}" for one in found for path, value in leaves_of(one) if path in named]


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else [(name, one) for one in value]
        if isinstance(value, list)
        else ()
    )
    for key, one in inner:
        yield from leaves_of(one, key)
    if not isinstance(value, dict | list):
        yield name, value


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: json.dumps(value)[:90])
def test_a_request_has_the_status_and_the_shape_that_vllms_server_gives_it(
    both: Both, path: str, body: dict[str, Any]
):
    theirs, ours = ask_both(both, path, body)
    assert ours.status_code == theirs.status_code, (ours.text[:600], theirs.text[:600])
    assert ours.headers["content-type"] == theirs.headers["content-type"]
    if ours.status_code != 200:
        named = ours.json()["error"]
        assert named["message"] and named["type"], ours.text
    elif body.get("stream"):
        assert events_of(ours.text) == events_of(theirs.text)
    else:
        assert shape_of(ours.json()) == shape_of(theirs.json())
        if path not in ("completions", "messages/count_tokens") and "echo" not in body:
            assert said_in(ours.text) == said_in(theirs.text)


@pytest.mark.parametrize(("path", "body"), FREE_IN_VLLM, ids=lambda value: json.dumps(value)[:90])
def test_a_request_that_binds_the_answer_is_served_too(both: Both, path: str, body: dict[str, Any]):
    theirs, ours = ask_both(both, path, body)
    assert ours.status_code == theirs.status_code == 200, (ours.text[:600], theirs.text[:600])
    assert ours.headers["x-asyncrl-overridden"] in body
    assert set(ours.json()) == set(theirs.json())


def test_the_list_of_models_has_the_same_shape(both: Both):
    agent = both.stage.open()
    theirs = httpx.get(f"{both.vllm_url}/v1/models", timeout=CALL_S).json()
    ours = httpx.get(f"{agent.session['base_url']}/models", timeout=CALL_S).json()
    assert shape_of(ours) == shape_of(theirs)
    both.stage.post("/reward", {"error": "enough seen"}, agent.key)
