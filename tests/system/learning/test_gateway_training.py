"""Agents that know OpenAI's API alone train a model through `asyncrl up`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from asyncrl.cli.audit.report import verify_run
from asyncrl.control.machine.processes import pids_of_run
from recipes.tool_agent.__main__ import CLUSTER
from rollout_service.engine.sglang.process import MODULE, PYTHON
from tests.buffer.journals.redis.redis_parts import free_port
from tests.system.parts.gateway_agent import agents_at
from tests.system.parts.up_run import UpRun, leftovers
from tests.waiting import wait_for

pytestmark = pytest.mark.long
SMALL = ("rollout.replicas=1", "rollout.group_size=4", "learner.groups_per_step=4", "eval.every_steps=0")
NUM_STEPS, NUM_AGENTS = 20, 8


def test_agents_train_a_model_through_their_base_url(up: Callable[..., UpRun]):
    run = up("gateway", *SMALL, "rollout.gateway={port: 0}", f"learner.steps={NUM_STEPS}")
    status = run.wait_for(lambda s: bool(s["services"].get("rollout.0", {}).get("gateway")))
    gateway = status["services"]["rollout.0"]["gateway"]
    with agents_at(gateway, NUM_AGENTS) as episodes:
        code, output = run.finish()
    assert code == 0, output
    rows = run.rows()
    assert len(rows) == NUM_STEPS and run.summary()["ledger_residue"] == 0
    assert len(episodes.rewards) >= NUM_STEPS * 16
    means = [row["critic/rewards/mean"] for row in rows]
    assert 0.0 < sum(means) / NUM_STEPS < 1.0, "the rewards of the agents are not those that were trained"
    assert max(row["staleness/lag_max_trained"] for row in rows) <= 4


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PYTHON.exists(), reason="SGLang is not there: make setup LIST=sglang")
def test_a_killed_engine_ends_the_calls_of_its_agents_and_their_group_is_tried_again(
    up: Callable[..., UpRun],
):
    gateway = f"http://127.0.0.1:{(port := free_port())}"
    engine = ("rollout.engine=sglang", f"rollout.gateway={{port: {port}}}", "launcher.start_deadline_s=600")
    run = up("gateway_killed", *SMALL, *engine, "learner.steps=4")
    run.wait_for(lambda s: bool(s["services"].get("rollout.0", {}).get("gateway")), 600.0)
    session = open_session(gateway)
    run_id = json.loads((run.folder / "run.json").read_text())["run_id"]
    commands = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in pids_of_run(run_id)}
    (child,) = [pid for pid, command in commands.items() if f"-m {MODULE}" in command]
    os.killpg(child, signal.SIGSTOP)  # the call stays in flight
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(complete, session)
        wait_for(lambda: post_reward(gateway, session).status_code == 409, "the call to be in flight")
        os.killpg(child, signal.SIGKILL)
        with pytest.raises((openai.APIError, openai.APIConnectionError)):
            calling.result(60.0)
    again = open_session(gateway)
    assert (again["ticket"], again["sample"]) == (session["ticket"], session["sample"])
    assert [one["session"].split(".")[1] for one in (session, again)] == ["1", "2"], "its second attempt"
    assert complete(again)
    with agents_at(gateway, NUM_AGENTS):
        assert post_reward(gateway, again).status_code == 200
        code, output = run.finish()
    assert code == 0, output
    assert verify_run(str(run.folder), "")["findings"] == [] and run.summary()["ledger_residue"] == 0
    assert leftovers(run.folder) == []


def open_session(gateway: str) -> dict[str, Any]:
    """Open a session as soon as the gateway is there and has one."""
    found: list[dict[str, Any]] = []

    def is_open() -> bool:
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.post(f"{gateway}/sessions", json={"wait_s": 5}, timeout=60.0)
            found.extend([reply.json()] if reply.status_code == 200 else [])
        return bool(found)

    wait_for(is_open, "a session", 300.0)
    return found[0]


def complete(session: dict[str, Any]) -> str:
    with openai.OpenAI(base_url=session["base_url"], api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="policy", prompt=session["prompt"], max_tokens=7)
    return answer.choices[0].text


def post_reward(gateway: str, session: dict[str, Any]) -> httpx.Response:
    key = {"Authorization": f"Bearer {session['key']}"}
    return httpx.post(f"{gateway}/reward", json={"reward": 0.0}, headers=key, timeout=60.0)


def start_recipe(folder: Path, *changes: str) -> UpRun:
    """Start the one command of the recipe in an empty folder: it makes the model, a run and agents."""
    sets = [part for change in (f"run.dir={folder}", *changes) for part in ("--set", change)]
    process = subprocess.Popen(
        [sys.executable, "-m", "recipes.tool_agent", "--port", str(free_port()), *sets],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CLUSTER.parents[2])},
    )
    return UpRun(folder / "tool_agent", process)


@pytest.mark.timeout(1500)
def test_the_recipe_learns_to_call_the_right_tool(tmp_path: Path):
    """From one in eight, in a third of its steps."""
    run = start_recipe(tmp_path, "learner.steps=40", "learner.lr_schedule=constant")
    try:
        code, output = run.finish(1200.0)
    finally:
        run.end()
    assert code == 0, output
    rewards = [row["critic/rewards/mean"] for row in run.rows()]
    assert len(rewards) == 40
    assert sum(rewards[:5]) / 5 <= 0.3, "it begins at chance"
    assert sum(rewards[-5:]) / 5 >= 0.4
    assert verify_run(str(run.folder), "")["findings"] == []
    assert run.summary()["ledger_residue"] == 0
