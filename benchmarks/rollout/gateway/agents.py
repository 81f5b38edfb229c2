"""Agents of another process: chats of several turns, one request at a time each, streamed or not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

from asyncrl.core.errors import ServiceFailed
from benchmarks.weight_sync.peers.peers import obey

NOT_NOW = 503
TIMEOUT_S = 120.0
WARM_UP_S = 0.3


@dataclass(frozen=True)
class Load:
    """So many agents at once, each with episodes of `num_turns` answers of `num_tokens` tokens."""

    num_agents: int
    num_turns: int
    num_tokens: int
    is_streamed: bool


Answered = list[tuple[float, int]]
"""Times at which one agent had an answer, and the answers' tokens."""


class Agents:
    """The agents of one server.

    Args:
        has_sessions: It is the gateway: a session is opened for each episode, and ends with a reward.
    """

    def __init__(self, url: str, load: Load, has_sessions: bool) -> None:
        self._url, self._load = url, load
        self._has_sessions = has_sessions
        self._over = asyncio.Event()

    async def work(self, seconds: float) -> dict[str, float]:
        """Return tokens per second of all agents after a warm-up, and how many there were in all."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        answers: list[Answered] = [[] for _ in range(self._load.num_agents)]
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            agents = [asyncio.create_task(self._go_on(http, answered)) for answered in answers]
            begun = time.monotonic() + WARM_UP_S
            await asyncio.wait(agents, timeout=WARM_UP_S + seconds, return_when=asyncio.FIRST_EXCEPTION)
            self._over.set()
            await asyncio.gather(*agents)
        rates = (_rate([one for one in answered if one[0] >= begun]) for answered in answers)
        return {"tokens_per_s": sum(rates), "num_tokens": float(sum(n for one in answers for _, n in one))}

    async def _go_on(self, http: aiohttp.ClientSession, answered: Answered) -> None:
        while not self._over.is_set():
            async with self._episode(http) as url:
                messages = [{"role": "user", "content": "Count with me."}]
                for turn in range(self._load.num_turns):
                    said, num_tokens = await self._ask(http, url, messages)
                    answered.append((time.monotonic(), num_tokens))
                    if self._over.is_set():
                        break
                    messages.append({"role": "assistant", "content": said})
                    messages.append({"role": "user", "content": f"Go on, part {turn + 2}."})

    @asynccontextmanager
    async def _episode(self, http: aiohttp.ClientSession) -> AsyncIterator[str]:
        """The address of an episode's model."""
        if not self._has_sessions:
            yield f"{self._url}/v1"
            return
        while True:
            async with http.post(f"{self._url}/sessions", json={"wait_s": 5}) as opened:
                session = await opened.json()
            if opened.status != NOT_NOW:
                break
        yield session["base_url"]
        async with http.post(f"{self._url}/sessions/{session['key']}/reward", json={"reward": 1.0}) as closed:
            await _check(closed)

    async def _ask(
        self, http: aiohttp.ClientSession, url: str, messages: list[dict[str, str]]
    ) -> tuple[str, int]:
        body: dict[str, Any] = {
            "model": "policy",
            "messages": messages,
            "max_tokens": self._load.num_tokens,
            "temperature": 1.0,
        }
        if self._load.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with http.post(f"{url}/chat/completions", json=body) as answered:
            await _check(answered)
            text = await answered.text()
        return _read_stream(text) if self._load.is_streamed else _read(json.loads(text))


def _rate(answered: Answered) -> float:
    """Return tokens per second between an agent's first and last answer: no turn is counted in part.

    >>> _rate([(1.0, 8), (2.0, 10), (3.0, 10)])
    10.0
    """
    if len(answered) < 2:
        return 0.0
    return sum(num_tokens for _, num_tokens in answered[1:]) / (answered[-1][0] - answered[0][0])


def _read(answer: Any) -> tuple[str, int]:
    return answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"]


def _read_stream(text: str) -> tuple[str, int]:
    """Return what the parts of a stream say, and how many tokens it is."""
    said, num_tokens = [], 0
    for line in text.split("\n\n"):
        data = line.removeprefix("data: ")
        if not data.startswith("{"):
            continue
        part = json.loads(data)
        if part["choices"]:
            said.append(part["choices"][0]["delta"].get("content") or "")
        elif part.get("usage"):
            num_tokens = part["usage"]["completion_tokens"]
    return "".join(said), num_tokens


async def _check(answered: aiohttp.ClientResponse) -> None:
    if answered.status != 200:
        raise ServiceFailed(f"an agent was answered {answered.status}: {(await answered.text())[:300]}")


def run_agents(pipe: Connection) -> None:
    """Entry of the agents' process."""

    def work(url: str, load: Load, has_sessions: bool, seconds: float) -> dict[str, float]:
        return asyncio.run(Agents(url, load, has_sessions).work(seconds))

    obey(pipe, {"work": work})
