"""Agents that know OpenAI's API alone train a model through `asyncrl up`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import openai
import pytest

from tests.system.parts.up_run import UpRun

pytestmark = pytest.mark.long
SMALL = ("rollout.replicas=1", "rollout.group_size=4", "learner.groups_per_step=4", "eval.every_steps=0")
NUM_STEPS, NUM_AGENTS = 20, 8


def run_agent(gateway: str, is_over: threading.Event, rewards: list[float]) -> None:
    """Sort digits, look at the answer, and say how good it was, again and again."""
    with httpx.Client(base_url=gateway, timeout=60.0) as http:
        while not is_over.is_set():
            try:
                reply = http.post("/sessions", json={"wait_s": 5})
                if reply.status_code != 200:
                    continue
                session = reply.json()
                agent = openai.OpenAI(base_url=session["base_url"], api_key="none", timeout=60.0)
                answer = agent.completions.create(model="policy", prompt=session["prompt"], max_tokens=7)
                reward = float(answer.choices[0].text == "".join(sorted(session["prompt"].strip("="))))
                key = {"Authorization": f"Bearer {session['key']}"}
                http.post("/reward", json={"reward": reward, "parts": {"sorted": reward}}, headers=key)
                rewards.append(reward)
            except (httpx.HTTPError, openai.OpenAIError):
                is_over.wait(0.2)  # the run has ended, or an end came between two calls


def test_agents_train_a_model_through_their_base_url(up: Callable[..., UpRun]):
    run = up("gateway", *SMALL, "rollout.gateway={port: 0}", f"learner.steps={NUM_STEPS}")
    status = run.wait_for(lambda s: bool(s["services"].get("rollout.0", {}).get("gateway")))
    gateway = status["services"]["rollout.0"]["gateway"]
    is_over, rewards = threading.Event(), list[float]()
    agents = [threading.Thread(target=run_agent, args=(gateway, is_over, rewards)) for _ in range(NUM_AGENTS)]
    for agent in agents:
        agent.start()
    try:
        code, output = run.finish()
    finally:
        is_over.set()
        for agent in agents:
            agent.join(70.0)
    assert code == 0, output
    rows = run.rows()
    assert len(rows) == NUM_STEPS and run.summary()["ledger_residue"] == 0
    assert len(rewards) >= NUM_STEPS * 16
    means = [row["critic/rewards/mean"] for row in rows]
    assert 0.0 < sum(means) / NUM_STEPS < 1.0, "the rewards of the agents are not those that were trained"
    assert max(row["staleness/lag_max_trained"] for row in rows) <= 4
