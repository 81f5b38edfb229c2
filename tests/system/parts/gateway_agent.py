"""An agent that knows the OpenAI API alone, as a user of the gateway writes it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import openai


@dataclass
class Episodes:
    """What the agents of one gateway did.

    Attributes:
        rewards: Of each episode.
        took_s: Seconds from a prompt to its answer, of each episode.
    """

    rewards: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)


@contextlib.contextmanager
def agents_at(gateway: str, num_agents: int, key: str = "none") -> Iterator[Episodes]:
    """Let agents work on a gateway, and yield what they have done."""
    is_over, episodes = threading.Event(), Episodes()
    arguments = (gateway, is_over, episodes, key)
    agents = [threading.Thread(target=_run_agent, args=arguments) for _ in range(num_agents)]
    for agent in agents:
        agent.start()
    try:
        yield episodes
    finally:
        is_over.set()
        for agent in agents:
            agent.join(70.0)


def _run_agent(gateway: str, is_over: threading.Event, episodes: Episodes, key: str) -> None:
    """Sort digits, look at the answer, and say how good it was, again and again."""
    with httpx.Client(base_url=gateway, timeout=60.0) as http:
        while not is_over.is_set():
            try:
                opener = {"Authorization": f"Bearer {key}"}
                reply = http.post("/sessions", json={"wait_s": 5}, headers=opener)
                if reply.status_code != 200:
                    continue
                session = reply.json()
                agent = openai.OpenAI(base_url=session["base_url"], api_key="none", timeout=60.0)
                begun = time.monotonic()
                answer = agent.completions.create(model="policy", prompt=session["prompt"], max_tokens=7)
                episodes.took_s.append(time.monotonic() - begun)
                reward = float(answer.choices[0].text == "".join(sorted(session["prompt"].strip("="))))
                its_own = {"Authorization": f"Bearer {session['key']}"}
                http.post("/reward", json={"reward": reward, "parts": {"sorted": reward}}, headers=its_own)
                episodes.rewards.append(reward)
            except (httpx.HTTPError, openai.OpenAIError):
                is_over.wait(0.2)  # the run has ended, or an end came between two calls
