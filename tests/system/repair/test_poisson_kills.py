"""A quarter of an hour in which any process of a run may die at any time: the demo learns all the same.

A whole run of `asyncrl up` with the real parts; `pytest -m long -s tests/system/repair/test_poisson_kills.py`
prints who died and how much was trained beside an undisturbed minute of the same run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.audit.report import verify_run
from asyncrl.control.machine.processes import pids_of_run
from tests.system.parts.up_run import UpRun, leftovers
from tests.system.repair.test_kills import is_at_work

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

MEAN_S, DURATION_S, CALM_S = 60.0, 900.0, 60.0
ACCURACY = 0.85
"""On held-out prompts; the demo begins near 0.08 and reaches 0.95 undisturbed."""
SERVICE = "ASYNCRL_SERVICE="


def services_of(run: UpRun) -> dict[int, str]:
    """Return the processes of the run's services and their children, and of the supervisor, by id."""
    run_id = json.loads((run.folder / "run.json").read_text())["run_id"]
    found = {}
    for pid in pids_of_run(run_id):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            names = [value.decode() for value in environment if value.startswith(SERVICE.encode())]
            if names:
                found[pid] = names[0].removeprefix(SERVICE)
    return found


def steps_of(run: UpRun) -> int:
    """Return the newest step on record."""
    return max((int(row["training/global_step"]) for row in run.rows()), default=0)


def choose(source: random.Random, services: dict[int, str]) -> tuple[int, str]:
    """Return one process of one service: each service as likely, however many processes it has."""
    name = source.choice(sorted(set(services.values())))
    return source.choice(sorted(pid for pid, found in services.items() if found == name)), name


def test_the_demo_learns_though_its_processes_die_at_random(up: Callable[..., UpRun]) -> None:
    source, victims = random.Random(0), Counter[str]()
    run = up("poisson", "learner.steps=100000", "checkpoint.every_steps=10", "launcher.max_restarts=100")
    run.wait_for(lambda status: is_at_work(status) and status["step"] >= 10)
    first = steps_of(run)
    time.sleep(CALM_S)
    calm_rate = (steps_of(run) - first) / CALM_S

    first, end = steps_of(run), time.monotonic() + DURATION_S
    while (wait_s := source.expovariate(1 / MEAN_S)) < end - time.monotonic():
        time.sleep(wait_s)
        pid, name = choose(source, services_of(run))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            victims[name] += 1
    time.sleep(max(0.0, end - time.monotonic()))
    rate = (steps_of(run) - first) / DURATION_S
    print(f"{victims.total()} kills: {dict(victims)}; steps/s {rate:.2f}, undisturbed {calm_rate:.2f}")
    status: dict[str, Any] = run.wait_for(is_at_work, 300.0)
    print(f"goodput {rate / calm_rate:.2f}, accuracy {status['accuracy']}, step {status['step']}")

    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert verify_run(str(run.folder), "")["findings"] == []
    assert leftovers(run.folder) == []
    assert run.summary()["ledger_residue"] == 0
    assert status["accuracy"] >= ACCURACY
    assert rate >= calm_rate / 2
