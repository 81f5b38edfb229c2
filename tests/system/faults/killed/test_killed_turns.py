"""Kill -9 of a replica inside a tool's call: its episodes go on elsewhere, and each call counts once."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.cli.audit.report import verify_run
from asyncrl.core.states import Reason
from asyncrl.core.status.service import BufferStatus
from tests.system.parts.up_run import UpRun, leftovers

NUM_TURNS, GROUP_SIZE = 4, 2
KILLED = (5, 0, 2)
"""Ticket, sample and turn of the call whose first attempt kills its replica."""
ENVIRONMENT = """
import json, os, signal
from pathlib import Path

from rollout_service.environments.tools.calls import Call
from rollout_service.environments.tools.tool import Tool
from rollout_service.environments.tools.tool_use import ToolEpisode

PLACE = Path(__file__).with_suffix(".jsonl")


class Count(Tool):
    name, description, argument = "count", "", "text"
    is_idempotent = IS_IDEMPOTENT

    async def call(self, text, key):
        known = [json.loads(line)["key"] for line in PLACE.read_text().splitlines()] if PLACE.exists() else []
        if not (self.is_idempotent and str(key) in known):
            said = {"key": str(key), "place": [key.ticket, key.sample, key.turn], "text": text}
            with PLACE.open("a") as file:
                file.write(json.dumps(said) + "\\n")
        if (key.ticket, key.sample, key.turn, key.fencing_token) == (*KILLED, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return "1"


class EveryTurn:
    roles = ("user",)

    def find(self, answer):
        return [Call("count", {"text": answer})]

    def tell(self, results):
        return "".join(results)


class Counting(ToolEpisode):
    def __init__(self, prompt, seed):
        super().__init__({"count": Count()}, EveryTurn())
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
"""


@pytest.mark.long
@pytest.mark.parametrize("is_idempotent", [True, False], ids=["idempotent", "not idempotent"])
def test_each_call_counts_once_though_its_replica_is_killed_inside_one(
    up: Callable[..., UpRun], tmp_path: Path, is_idempotent: bool
) -> None:
    text = ENVIRONMENT.replace("IS_IDEMPOTENT", str(is_idempotent)).replace("KILLED", str(KILLED))
    (tmp_path / "counting.py").write_text(text)
    (tmp_path / "reward.py").write_text(REWARD)
    run = up(
        f"killed-turns-{is_idempotent}",
        *("rollout.engine=scripted", "rollout.resume_partial=true", "rollout.max_tokens=200"),
        *(f"rollout.group_size={GROUP_SIZE}", "learner.groups_per_step=4", "learner.minibatches=1"),
        f"rollout.environment.name={tmp_path / 'counting.py'}:Counting",
        f"rollout.environment.max_turns={NUM_TURNS}",
        f"reward.fn={tmp_path / 'reward.py'}:compute_score",
        *("learner.steps=2000", "eval.every_steps=0"),
    )
    run.wait_for(lambda status: status["ledger"].get("issued", 0) > KILLED[0])
    told = wait_for_end(run, tmp_path / "counting.jsonl", is_idempotent)
    effects = read(tmp_path / "counting.jsonl")
    assert max(Counter(one["place"] for one in effects).values()) == 1, "a call counted twice"
    keys = [one["key"] for one in effects if one["place"][0] == KILLED[0]]
    if is_idempotent:
        assert len(keys) == NUM_TURNS * GROUP_SIZE
        assert {f"5.1.0.{turn}.0" for turn in range(3)} <= set(keys), "recorded turns are not said again"
        assert "5.2.0.3.0" in keys, "the turn after the kill is another attempt's"
    else:
        reasons = [name for name in told.counters if name.startswith("failed/")]
        assert all(name.startswith("failed/EnvironmentFailed: call ") for name in reasons), reasons
        assert any(name.startswith("failed/EnvironmentFailed: call 5.1.0.2.0 ") for name in reasons)
    assert told.reissues["deregistered"] + told.reissues.get("expired", 0) >= 1, "a replica was killed"
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert verify_run(str(run.folder), "")["findings"] == []
    assert run.summary()["ledger_residue"] == 0
    assert leftovers(run.folder) == []


def read(path: Path) -> list[dict]:  # type: ignore[type-arg]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [one | {"place": tuple(one["place"])} for one in found]


def wait_for_end(run: UpRun, path: Path, is_idempotent: bool) -> BufferStatus:
    """Wait until the killed ticket has made all its calls, or is given up; return the buffer's status."""
    sockets = json.loads((run.folder / "run.json").read_text())["sockets"]
    client, end = LearnerClient(f"ipc://{sockets}/buffer.0"), time.monotonic() + 120.0
    try:
        while True:
            told = client.status()
            num_calls = sum(one["place"][0] == KILLED[0] for one in read(path))
            has_failed = any(" 5.1.0.2.0 " in name for name in told.counters) and told.dropped.get(
                Reason.NOT_RETRYABLE
            )
            if has_failed or (is_idempotent and num_calls >= NUM_TURNS * GROUP_SIZE):
                return told
            assert time.monotonic() < end, (num_calls, told)
            time.sleep(0.2)
    finally:
        client.close()
