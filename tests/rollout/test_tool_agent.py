"""The recipe of an agent with tools: its warm start prefers nothing, and its reward is for the whole episode.

`tests/system/learning/test_gateway_training.py` has it learn.
"""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from asyncrl.core.config.load import load_config
from recipes.tool_agent import agent, model
from recipes.tool_agent.__main__ import CLUSTER

TICKET = "7"
PARTS = re.compile(r"the (\w+), not the (\w+), in (\w+), not (\w+)\?.*", re.DOTALL)
CALLED = re.compile(r'"name": "(\w+)", "arguments": {"city": "(\w+)"}')


class ScriptedGateway(BaseHTTPRequestHandler):
    """A gateway whose model says what `say(messages)` returns: a call, an answer, or None for no room."""

    say: Callable[[list[Any]], tuple[str, str] | str | None]
    rewards: list[float]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/sessions":
            place = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
            session = {"key": "k", "base_url": place, "ticket": TICKET, "ground_truth": ["wind", "Rome"]}
            self.answer(200, {**session, "prompt": [{"role": "user", "content": "What is the wind?"}]})
        elif self.path == "/reward":
            self.rewards.append(body["reward"])
            self.answer(200, {})
        elif (said := type(self).say(body["messages"])) is None:
            self.answer(400, {"error": {"message": "full", "type": "context_length_exceeded"}})
        else:
            self.answer(
                200, {"choices": [{"index": 0, "finish_reason": "stop", "message": message_of(said)}]}
            )

    def answer(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def message_of(said: tuple[str, str] | str) -> dict[str, Any]:
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    function = {"name": said[0], "arguments": said[1]}
    call = {"id": "c", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture(scope="module")
def episode() -> Iterator[Callable[[], float | None]]:
    """Return a function that runs an episode at a scripted gateway."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ScriptedGateway) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        with httpx.Client(timeout=30.0) as http, openai.OpenAI(base_url=address, api_key="none") as client:
            yield lambda: agent.run_episode(address, http, client)
        server.shutdown()
        thread.join()


def result_of(messages: list[Any]) -> str:
    """Return what the last tool has answered."""
    return str(messages[-1]["content"])


def calling(tool: str, arguments: str, answer: Callable[[list[Any]], str | None] = result_of) -> Any:
    return lambda messages: (tool, arguments) if len(messages) == 1 else answer(messages)


ROME = '{"city": "Rome"}'


@pytest.mark.parametrize(
    ("say", "reward"),
    [
        (calling("wind", ROME), 1.0),
        (calling("rain", ROME), 0.0),
        (calling("wind", '{"city": "Oslo"}'), 0.0),
        (calling("wind", "no JSON"), 0.0),
        (calling("wind", '{"town": "Rome"}'), 0.0),
        (calling("wind", ROME, lambda messages: result_of(messages)[::-1]), 0.0),
        (calling("wind", ROME, lambda messages: None), 0.0),
        (lambda messages: "42", 0.0),
        (lambda messages: None, 0.0),
    ],
)
def test_only_the_right_tool_with_the_right_city_and_its_result_is_paid(
    episode: Callable[[], float | None], say: Any, reward: float
):
    ScriptedGateway.say, ScriptedGateway.rewards = staticmethod(say), []
    assert episode() == reward
    assert ScriptedGateway.rewards == [reward]


def test_instruments_differ_and_stay_as_they_are_in_a_group():
    shown = [agent.measure(TICKET, tool, city) for tool in model.TOOLS for city in model.CITIES]
    assert shown == [agent.measure(TICKET, tool, city) for tool in model.TOOLS for city in model.CITIES]
    assert len(set(shown)) > len(shown) // 2
    assert agent.measure("8", "wind", "Rome") != agent.measure(TICKET, "wind", "Rome")


def test_the_warm_start_sees_each_choice_equally_often():
    dice, found, num_copied = random.Random(1), Counter[tuple[bool, bool]](), 0
    for _ in range(2000):
        (asked, _), (call, _), (told, _), (answer, _) = model.draw_episode(dice)
        tool, other_tool, city, other_city = PARTS.findall(asked)[0]
        called = CALLED.findall(call)[0]
        assert called[0] in (tool, other_tool) and called[1] in (city, other_city)
        found[(called[0] == tool, called[1] == city)] += 1
        num_copied += f"\n{answer.removesuffix('<|im_end|>')}\n" in told
    assert all(440 <= count <= 560 for count in found.values()) and len(found) == 4
    assert 900 <= num_copied <= 1110, "one in two is the result, and of the others one in a hundred"


def test_a_conversation_has_the_ids_of_the_warm_start_and_its_room():
    tokenizer, parts = model.make_tokenizer(), model.draw_episode(random.Random(2))
    name, city = CALLED.findall(parts[1][0])[0]
    (result,) = re.findall(r"\n(\d\d)\n", parts[2][0])
    question = re.search("What .*[?]", parts[0][0])
    assert question
    messages: list[Any] = [{"role": "user", "content": question[0]}]
    call = {"type": "function", "id": "c", "function": {"name": name, "arguments": {"city": city}}}
    messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": result}]
    ids = tokenizer.apply_chat_template(
        messages, tools=agent.TOOLS, add_generation_prompt=True, return_dict=False
    )
    pieces = [tokenizer(text)["input_ids"] for text, _ in parts]
    assert ids == [*pieces[0], *pieces[1], *pieces[2]]
    config = load_config(CLUSTER)
    assert len(pieces[0]) <= config.data.max_prompt_tokens
    assert sum(map(len, pieces[1:])) <= config.rollout.max_tokens


def test_the_prompts_name_the_right_choice_first(tmp_path: Path):
    model.write_prompts(tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len({row["prompt"][0]["content"] for row in rows}) == 4 * 3 * 6 * 5
    for row in rows:
        tool, _, city, _ = PARTS.findall(row["prompt"][0]["content"])[0]
        assert row["ground_truth"] == [tool, city]
