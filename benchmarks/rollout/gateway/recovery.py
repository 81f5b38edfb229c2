"""Seconds from `kill -9` of a replica inside a tool's call to the next turn of the episode, on another one.

A run as `asyncrl up` starts it, with the scripted engine, two replicas and turns that are recorded. The tool
kills its own replica, at the first attempt at one turn of each chosen ticket. What passes is the supervisor's
notice, the ledger's new lease, the recorded turns and the model's next answer.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from asyncrl.cli.run import start as run
from asyncrl.core.config.load import load_config
from asyncrl.core.errors import ServiceFailed
from configs import shipped

NUM_TURNS, KILLED_TURN = 4, 1
FIRST_TICKET, APART = 4, 40
"""Tickets whose replica is killed: so many lie between two of them."""
START_S, STOP_S, POLL_S = 300.0, 30.0, 0.1
ENVIRONMENT = """
import json, os, signal, time
from pathlib import Path

from rollout_service.environments.tools.calls import Call
from rollout_service.environments.tools.tool import Tool
from rollout_service.environments.tools.tool_use import ToolEpisode

TICKETS, TURN = {tickets}, {turn}
CALLS = Path(__file__).with_suffix(".jsonl")


class Note(Tool):
    name, description, argument, is_idempotent = "note", "", "text", True

    async def call(self, text, key):
        if key.ticket in TICKETS and key.sample == 0:
            said = {{"ticket": key.ticket, "turn": key.turn, "token": key.fencing_token, "at": time.time()}}
            with CALLS.open("a") as file:
                file.write(json.dumps(said) + "\\n")
            if key.turn == TURN and key.fencing_token == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return "1"


class EveryTurn:
    roles = ("user",)

    def find(self, answer):
        return [Call("note", {{"text": answer}})]

    def tell(self, results):
        return "".join(results)


class Noted(ToolEpisode):
    def __init__(self, prompt, seed):
        super().__init__({{"note": Note()}}, EveryTurn())
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str))
"""


def measure_recovery(num_kills: int, folder: Path) -> list[float]:
    """Return the seconds of each kill. Raises ServiceFailed: the run failed, or a ticket did not go on."""
    tickets = [FIRST_TICKET + APART * number for number in range(num_kills)]
    (folder / "noted.py").write_text(ENVIRONMENT.format(tickets=tickets, turn=KILLED_TURN))
    (folder / "reward.py").write_text(REWARD)
    settings = {
        "run.name": "recovery",
        "run.dir": str(folder / "runs"),
        "rollout.engine": "scripted",
        "rollout.replicas": 2,
        "rollout.resume_partial": "true",
        "rollout.max_tokens": 200,
        "rollout.environment.name": f"{folder / 'noted.py'}:Noted",
        "rollout.environment.max_turns": NUM_TURNS,
        "reward.fn": f"{folder / 'reward.py'}:compute_score",
        "learner.steps": 100_000,
        "eval.every_steps": 0,
    }
    config = load_config(shipped()["quickstart"], [f"{key}={value}" for key, value in settings.items()])
    handle = run.start(config, lambda line: None)
    try:
        end = time.monotonic() + START_S
        while len(found := read_recoveries(folder / "noted.jsonl")) < num_kills:
            if handle.is_over or time.monotonic() > end:
                raise ServiceFailed(f"{len(found)} of {num_kills} episodes went on: {handle.result()}")
            time.sleep(POLL_S)
    finally:
        handle.stop(STOP_S)
    return [found[ticket] for ticket in tickets]


def read_recoveries(calls: Path) -> dict[int, float]:
    """Return the seconds from the call that killed to the first call of the next turn, by ticket."""
    lines = calls.read_text().splitlines() if calls.exists() else []
    killed: dict[int, float] = {}
    found: dict[int, float] = {}
    for one in map(json.loads, lines):
        if one["turn"] == KILLED_TURN and one["token"] == 1:
            killed[one["ticket"]] = one["at"]
        if one["turn"] == KILLED_TURN + 1 and one["ticket"] in killed:
            found.setdefault(one["ticket"], one["at"] - killed[one["ticket"]])
    return found
