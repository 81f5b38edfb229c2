"""Agents whose replica is killed go on in their sessions, at the same address, once it is back."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import openai
import pytest

from asyncrl.cli.audit.report import verify_run
from tests.buffer.journals.redis.redis_parts import free_port
from tests.system.learning.test_gateway_training import open_session, post_reward
from tests.system.parts.gateway_agent import agents_at
from tests.system.parts.up_run import UpRun, leftovers
from tests.waiting import wait_for

pytestmark = pytest.mark.long
SMALL = ("rollout.group_size=2", "learner.groups_per_step=4", "eval.every_steps=0", "learner.steps=2000")


def free_pair() -> int:
    """Return the first of two free ports in a row."""
    while True:
        port = free_port()
        with socket.socket() as second:
            if second.connect_ex(("127.0.0.1", port + 1)):
                return port


def say(session: dict[str, Any], prompt: str, stream: bool = False) -> str:
    """Return an answer, asked for until there is one: its gateway may be away."""
    answers: list[str] = []

    def is_answered() -> bool:
        with openai.OpenAI(
            base_url=session["base_url"], api_key="none", max_retries=0, timeout=60.0
        ) as client:
            try:
                found = client.completions.create(model="policy", prompt=prompt, max_tokens=7, stream=stream)
                answers.append(
                    "".join(part.choices[0].text for part in found) if stream else found.choices[0].text
                )
            except (openai.APIConnectionError, openai.InternalServerError):
                return False
        return True

    wait_for(is_answered, "an answer", 240.0)
    return answers[0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["kill", "drain"])
def test_sessions_go_on_after_their_replica_is_away_while_others_lease(up: Callable[..., UpRun], how: str):
    port = free_pair()
    gateways = [f"http://127.0.0.1:{port + index}" for index in range(2)]
    run = up(
        f"sessions_{how}",
        *SMALL,
        *("rollout.replicas=2", f"rollout.gateway={{port: {port}}}", "rollout.resume_partial=true"),
        *("buffer.lease_s=120", "staleness.max_lag=1000", "rollout.max_tokens=32"),
    )
    run.wait_for(lambda s: all(s["services"].get(f"rollout.{i}", {}).get("gateway") for i in range(2)))
    sessions = [open_session(gateways[0]) for _ in range(2)]
    assert len({one["ticket"] for one in sessions}) == 1
    said = [say(one, one["prompt"], stream=bool(index)) for index, one in enumerate(sessions)]
    assert post_reward(gateways[0], sessions[0]).status_code == 200, "its agent goes away"
    pid = run.status()["services"]["rollout.0"]["pid"]
    with agents_at(gateways[1], 4):
        os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGTERM)
        say(sessions[1], sessions[1]["prompt"] + said[1] + "1")
        assert run.status()["services"]["rollout.0"]["pid"] != pid
        assert post_reward(gateways[0], sessions[1]).status_code == 200
        run.wait_for(lambda s: s["ledger"]["trained"] >= 16)
    history = run.command("inspect", "ticket", str(sessions[0]["ticket"])).stdout
    assert "attempt 2 leased to rollout.0" in history, "it waited for its replica, though another asked"
    assert "record 4 of its turns" in history, "two answers, a reward, and the answer after it"
    assert "trained at step" in history
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert verify_run(str(run.folder), "")["findings"] == []
    assert run.summary()["ledger_residue"] == 0
    assert leftovers(run.folder) == []
