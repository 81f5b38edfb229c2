"""`kill -9` of each kind of process of a running job, and a replica that is stopped: each is replaced, alone.

Whole runs of `asyncrl up` with the real parts. The seconds until a service works again are printed, not
asserted: `pytest -m long tests/system/repair/test_kills.py -s`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.audit.report import verify_run
from asyncrl.control.machine.processes import pids_of_service
from asyncrl.control.record.events import EVENTS_FILE, load_events
from tests.system.parts.up_run import UpRun, leftovers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

REPAIR_DEADLINE_S = 200.0
"""Of one repair on a machine that other work keeps busy: only a run that hangs takes longer."""
AFTERMATH_S, AFTERMATH_STEPS = 10.0, 6
"""How long after a repair, and how many steps, the others are looked at: a service that cannot do without
the one that was struck aborts seconds later."""
UNITS = {"rollout": ("rollout", "receiver")}
"""Who may be restarted with whom: a replica's engine with its receiver."""
SETS = (
    "learner.steps=100000",
    "checkpoint.every_steps=5",
    "eval.every_steps=0",
    "launcher.max_restarts=20",
)


@dataclass(frozen=True)
class Blow:
    """What is done to whom.

    Attributes:
        number: The signal.
        is_child: It hits the process that the service has started: vLLM's engine core.
    """

    service: str
    number: signal.Signals = signal.SIGKILL
    is_child: bool = False

    def __str__(self) -> str:
        return f"{self.number.name} {self.service}{' (engine core)' if self.is_child else ''}"

    def may_restart(self, name: str) -> bool:
        """Tell whether the service `name` may be another process afterwards."""
        kind, index = self.service.split(".")
        return name in {f"{one}.{index}" for one in UNITS.get(kind, (kind,))}


BLOWS = (
    Blow("publisher.0"),
    Blow("weight_sync.0"),
    Blow("receiver.0"),
    Blow("buffer.0"),
    Blow("rollout.0"),
    Blow("learner.0"),
    Blow("rollout.1", signal.SIGSTOP),
)


def is_at_work(status: dict[str, Any]) -> bool:
    """Tell whether every service works."""
    return status.get("state") == "running" and all(
        service["stage"] == "READY" and service["pid"] for service in status["services"].values()
    )


def engine_core_of(run: UpRun, pid: int, service: str) -> int:
    """Return the process id of vLLM's engine core: the largest of the service's processes but its own."""
    run_id = json.loads((run.folder / "run.json").read_text())["run_id"]
    others = [found for found in pids_of_service(run_id, service) if found != pid]
    assert others, f"{service} has no engine core"
    return max(others, key=lambda found: int(Path(f"/proc/{found}/statm").read_text().split()[1]))


def pids_of(status: dict[str, Any]) -> dict[str, int]:
    """Return the process of each service of the run."""
    return {name: service["pid"] for name, service in status["services"].items()}


def strike(run: UpRun, blow: Blow) -> tuple[float, float]:
    """Strike, wait until every service works and the learner goes on, and see that nobody else was restarted.

    Returns:
        Seconds until all services worked again, and until three more steps were trained.
    """
    before = run.wait_for(is_at_work, REPAIR_DEADLINE_S)
    num_events = len(load_events(run.folder / EVENTS_FILE))
    pid = pids_of(before)[blow.service]
    restarts = before["services"][blow.service]["restarts"]
    os.kill(engine_core_of(run, pid, blow.service) if blow.is_child else pid, blow.number)
    began = time.monotonic()

    def is_repaired(status: dict[str, Any]) -> bool:
        service = status["services"].get(blow.service, {})
        return is_at_work(status) and service["pid"] != pid and service["restarts"] > restarts

    after = run.wait_for(is_repaired, REPAIR_DEADLINE_S)
    ready_s = time.monotonic() - began
    reached = after["step"]
    run.wait_for(lambda status: status["step"] >= reached + 3, REPAIR_DEADLINE_S)
    steps_s = time.monotonic() - began
    time.sleep(AFTERMATH_S)
    last = run.wait_for(
        lambda status: is_at_work(status) and status["step"] >= reached + AFTERMATH_STEPS, REPAIR_DEADLINE_S
    )
    check_the_others(run, blow, num_events, before, last)
    return ready_s, steps_s


def check_the_others(
    run: UpRun, blow: Blow, num_events: int, before: dict[str, Any], last: dict[str, Any]
) -> None:
    """Nobody but the one that was struck ended or was started since, and that one once.

    Args:
        num_events: On record before the blow.
        before, last: Statuses of before the blow and of the end.
    """
    found = load_events(run.folder / EVENTS_FILE)[num_events:]
    ends = [event for event in found if event["kind"] in ("exit", "start", "restart")]
    told = "\n".join(f"{event['kind']} {event['service']}: {event['text']}" for event in ends)
    others = [event for event in ends if not blow.may_restart(event["service"])]
    assert not others, f"{blow} was not all:\n{told}"
    starts = [event["service"] for event in ends if event["kind"] == "restart"]
    assert starts.count(blow.service) == 1 and len(starts) == len(set(starts)), f"after {blow}:\n{told}"
    then, pids = pids_of(before), pids_of(last)
    changed = {name for name in then.keys() | pids.keys() if then.get(name) != pids.get(name)}
    assert all(blow.may_restart(name) for name in changed), f"{blow} restarted {sorted(changed)}"


@pytest.mark.parametrize("engine", ["scripted", "vllm"])
def test_each_kind_of_process_is_replaced_alone_and_the_run_goes_on_to_a_sound_end(
    engine: str, up: Callable[..., UpRun]
) -> None:
    run = up(f"blows_{engine}", f"rollout.engine={engine}", *SETS)
    run.wait_for(lambda status: is_at_work(status) and status["step"] >= 6, REPAIR_DEADLINE_S)
    blows = [*BLOWS, Blow("rollout.0", is_child=True)] if engine == "vllm" else BLOWS
    for blow in blows:
        ready_s, steps_s = strike(run, blow)
        print(f"{blow!s:32} READY after {ready_s:5.1f} s, 3 steps after {steps_s:5.1f} s", flush=True)
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["ledger_residue"] == 0
    assert verify_run(str(run.folder), "")["findings"] == []
    assert leftovers(run.folder) == []
