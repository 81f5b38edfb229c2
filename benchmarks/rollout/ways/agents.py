"""Agents that generate through a replica's gateway: a session, one completion, a reward, again and again."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import httpx

from asyncrl.core.config.lengths import parse_lengths
from asyncrl.core.errors import ServiceFailed
from benchmarks.rollout.ways import setting
from benchmarks.weight_sync.peers.peers import obey

TIMEOUT_S = 600.0
NOT_NOW = 503


async def work(url: str, num_agents: int) -> None:
    """Keep so many agents at work until cancelled."""
    limits = httpx.Limits(max_connections=num_agents, max_keepalive_connections=num_agents)
    numbers = itertools.count()
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        async with asyncio.TaskGroup() as agents:
            for _ in range(num_agents):
                agents.create_task(_follow_on(client, numbers))


async def _follow_on(client: httpx.AsyncClient, numbers: Iterator[int]) -> None:
    lengths = parse_lengths(setting.RESPONSES)
    assert lengths is not None
    for number in numbers:
        opened = await client.post("/sessions", json={"wait_s": 5.0})
        if opened.status_code == NOT_NOW:
            continue
        session = opened.raise_for_status().json()
        body = {"prompt": session["prompt"], "max_tokens": lengths.draw_tokens(number, setting.MAX_TOKENS)}
        answered = await client.post(f"/sessions/{session['key']}/v1/completions", json=body)
        answered.raise_for_status()
        reward = {"reward": random.Random(number).random()}
        (await client.post(f"/sessions/{session['key']}/reward", json=reward)).raise_for_status()


def run_agents(pipe: Connection, url: str, num_agents: int) -> None:
    """Entry of the agents' process; `check` raises what ended them."""
    failures: list[str] = []

    def work_on() -> None:
        try:
            asyncio.run(work(url, num_agents))
        except* httpx.HTTPError as group:
            failures.extend(f"{type(error).__name__}: {error}" for error in group.exceptions)

    def check() -> None:
        if failures:
            raise ServiceFailed(f"an agent failed: {failures[0]}")

    threading.Thread(target=work_on, daemon=True).start()
    obey(pipe, {"check": check})
