"""`rollout.standby: 1` with vLLM: when the only replica is killed, the warm spare takes its work at once.

A whole run of `asyncrl up`; the seconds are printed, not asserted:
`pytest -m long -s tests/system/repair/test_standby.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.buffer.journals.event_database import read_commits
from asyncrl.buffer.ledger.events import Leased, Stored
from asyncrl.cli.audit.report import verify_run
from asyncrl.control.record.events import load_events
from tests.system.parts.up_run import UpRun, leftovers
from tests.system.repair.test_kills import REPAIR_DEADLINE_S, is_at_work

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

START_DEADLINE_S = 300.0
"""Of two engines at once, on a machine that other work keeps busy."""
SETS = (
    "rollout.replicas=1",
    "rollout.standby=1",
    "learner.steps=100000",
    "checkpoint.every_steps=20",
    "eval.every_steps=0",
)


def spares_of(status: dict[str, Any]) -> list[str]:
    """Return the replicas that stand by."""
    return [
        name for name, one in status["services"].items() if name.startswith("rollout.") and one["standby"]
    ]


def is_warm(status: dict[str, Any]) -> bool:
    """Tell whether one replica works and another stands by, loaded and in sync."""
    return is_at_work(status) and len(spares_of(status)) == 1 and status["step"] >= 6


def parts_of(run: UpRun, spare: str, struck_at: float) -> dict[str, float]:
    """Return the seconds from the blow to each event of the run, and to the spare's first lease and group."""
    parts = {
        f"{event['kind']} {event['service']}": event["time"] - struck_at
        for event in load_events(run.folder / "events.jsonl")
        if event["time"] > struck_at
    }
    held: set[int] = set()
    for commit in read_commits(run.folder / "buffer"):
        assert commit.time_s is not None
        for event in commit.events if commit.time_s > struck_at else ():
            if isinstance(event, Leased) and event.replica == spare:
                held.add(event.ticket)
                parts.setdefault(f"{spare} leases", commit.time_s - struck_at)
            elif isinstance(event, Stored) and event.ticket in held:
                parts.setdefault(f"{spare} has a group", commit.time_s - struck_at)
    return parts


def strike_the_replica(run: UpRun) -> None:
    """Kill the replica that leases; its spare leases, and the other one stands by when it is back."""
    before = run.wait_for(is_warm, START_DEADLINE_S)
    (spare,) = spares_of(before)
    (victim,) = (name for name in before["services"] if name.startswith("rollout.") and name != spare)
    struck_at = time.time()
    os.kill(before["services"][victim]["pid"], signal.SIGKILL)
    after = run.wait_for(lambda now: is_warm(now) and spares_of(now) == [victim], REPAIR_DEADLINE_S)
    reached = after["step"]
    run.wait_for(lambda status: status["step"] >= reached + 3, REPAIR_DEADLINE_S)
    parts = sorted(parts_of(run, spare, struck_at).items(), key=lambda part: part[1])
    print(f"SIGKILL {victim}: {', '.join(f'{after_s:.2f} s {what}' for what, after_s in parts)}", flush=True)
    assert {f"{spare} leases", f"{spare} has a group"} <= dict(parts).keys()
    restarts = {name: one["restarts"] for name, one in after["services"].items()}
    assert restarts[spare] == before["services"][spare]["restarts"], "the spare was started again"
    assert restarts[victim] == before["services"][victim]["restarts"] + 1


def test_a_warm_spare_takes_the_place_of_a_replica_that_was_killed_and_back_again(
    up: Callable[..., UpRun],
) -> None:
    run = up("spare", *SETS)
    for _ in range(2):
        strike_the_replica(run)
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["ledger_residue"] == 0
    assert verify_run(str(run.folder), "")["findings"] == []
    assert leftovers(run.folder) == []
