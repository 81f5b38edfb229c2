"""Random `kill -9` of a run's processes, far more often than `launcher.max_restarts` in ten minutes.

Whole runs of `asyncrl up` with vLLM, two replicas and the default `launcher.max_restarts`. Every 8 to 25 s
one process dies: a service is chosen first, then one of its processes, children included. Each victim is
printed, with the seed: `pytest -m long -s tests/system/repair/test_random_deaths.py`.
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

import psutil
import pytest

from asyncrl.cli.audit.report import verify_run
from asyncrl.control.machine.processes import pids_of_run, pids_of_service
from asyncrl.control.record.events import EVENTS_FILE, load_events
from tests.system.parts.up_run import UpRun, leftovers
from tests.system.repair.test_kills import is_at_work
from tests.system.repair.test_poisson_kills import steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

BETWEEN_S = (8.0, 25.0)
SUPERVISOR, SHM = "supervisor.0", Path("/dev/shm")
SETS = ("learner.steps=1000000", "checkpoint.every_steps=20", "launcher.start_deadline_s=900")
"""On two cores under much other work vLLM took over 300 s to start."""
START_S = 1200.0
FURTHER_STEPS = 5
"""That the run must train after the last death, within"""
FURTHER_S = 600.0
"""seconds: on a busy machine both replicas may have to load vLLM anew, or one of them is retired."""


def processes_of(run: UpRun, named: dict[str, int | None]) -> dict[str, list[int]]:
    """Return the living processes, children too, of the supervisor and of the services that are `named`."""
    run_id = json.loads((run.folder / "run.json").read_text())["run_id"]
    found = {SUPERVISOR: pids_of_service(run_id, SUPERVISOR)}
    for name, pid in named.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[name] = [] if pid is None else [pid, *_children(pid)]
    own = set(pids_of_run(run_id))
    return {name: alive for name, pids in found.items() if (alive := sorted(own & set(pids)))}


def _children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def semaphores_of(run: UpRun) -> set[str]:
    """Return the names of the semaphores that the run's processes have mapped: maps show a passing one."""
    run_id = json.loads((run.folder / "run.json").read_text())["run_id"]
    with os.scandir(SHM) as entries:
        names = {entry.inode(): entry.name for entry in entries if entry.name.startswith("sem.")}
    found = set()
    for pid in pids_of_run(run_id):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if "/dev/shm/sem." in line}
    return {names[inode] for inode in found & names.keys()}


class Trial:
    """A run whose processes are killed one by one, and what was seen of it.

    Attributes:
        marks: Named semaphores that its processes had mapped.
    """

    def __init__(self, run: UpRun, seed: int) -> None:
        self._run, self._source = run, random.Random(seed)
        self._newest, self._moved_at, self._longest_s = 0, time.monotonic(), 0.0
        self._named: dict[str, int | None] = {}
        self.victims: Counter[str] = Counter()
        self.marks: set[str] = set()

    def strike_for(self, seconds: float) -> None:
        """Kill a process every `BETWEEN_S` for so long; the run must not end."""
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds:
            self._watch_until(now + self._source.uniform(*BETWEEN_S))
            assert self._run.process.poll() is None, f"the run ended:\n{self._run.finish()[1]}"
            self.marks |= semaphores_of(self._run)
            self.victims[name := self._kill_one()] += 1
            print(f"{time.monotonic() - began:6.1f} s  step {self._newest:5}  kill {name}", flush=True)

    def _kill_one(self) -> str:
        """Kill a process of a service, each service as likely as another, and return whose it was.

        While no supervisor answers the services are those that the last one named: it is no likelier victim.
        """
        services = self._run.status().get("services", {})
        self._named = {name: one.get("pid") for name, one in services.items()} or self._named
        living = processes_of(self._run, self._named)
        if not living:
            return "nobody"
        name = self._source.choice(sorted(living))
        pid = self._source.choice(living[name])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return name if pid == living[name][0] else f"{name} (child)"

    def _watch_until(self, end: float) -> None:
        while (now := time.monotonic()) < end:
            if (step := steps_of(self._run)) > self._newest:
                self._newest, self._moved_at = step, now
            self._longest_s = max(self._longest_s, now - self._moved_at)
            time.sleep(0.5)

    def report(self) -> str:
        """Return who was killed how often, and what came of it."""
        kinds = Counter(event["kind"] for event in load_events(self._run.folder / EVENTS_FILE))
        return (
            f"{self.victims.total()} kills: {dict(sorted(self.victims.items()))}; "
            f"step {self._newest}, longest without one {self._longest_s:.0f} s; "
            f"{kinds['restart']} restarts, {kinds['retire']} retirements; {load()}"
        )


def load() -> str:
    """Return how busy this machine is."""
    return f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"


def outlive(run: UpRun, seed: int, minutes: float) -> None:
    """Let processes of the run die for so long, then see it train on, and end with nothing left."""
    run.wait_for(lambda status: is_at_work(status) and status["step"] >= 10, START_S)
    print(f"\nseed {seed}, {minutes:g} minutes, {load()}", flush=True)
    trial = Trial(run, seed)
    trial.strike_for(minutes * 60)
    print(trial.report(), flush=True)
    reached, ended = steps_of(run), time.monotonic()
    status = run.wait_for(lambda status: status.get("step", 0) >= reached + FURTHER_STEPS, FURTHER_S)
    print(f"step {status['step']} {time.monotonic() - ended:.0f} s after the last kill", flush=True)

    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert verify_run(str(run.folder), "")["findings"] == []
    assert run.summary()["ledger_residue"] == 0
    assert leftovers(run.folder) == []
    print(f"{len(trial.marks)} semaphores were mapped, for example {sorted(trial.marks)[:2]}")
    assert [name for name in trial.marks if (SHM / name).exists()] == []


@pytest.mark.parametrize(("seed", "minutes"), [(1, 12), (2, 12), (3, 30)])
def test_a_run_outlives_random_deaths_of_all_its_processes(
    seed: int, minutes: int, up: Callable[..., UpRun]
) -> None:
    outlive(up(f"deaths_{seed}", *SETS), seed, minutes)
