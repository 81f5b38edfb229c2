"""One `asyncrl up` in a process of its own, as a user starts it, and what a test asks of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from asyncrl.cli.run.handle import attach
from asyncrl.control.api.access import page_url
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.snapshot import HeadWord, values_of

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
UP_DEADLINE_S = 280.0


def asyncrl_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "asyncrl.cli", *arguments]


@dataclass
class UpRun:
    """One `asyncrl up` and the folder that it writes to.

    Attributes:
        told: The lines that it has printed, each with the time of the wall clock at which it came.
    """

    folder: Path
    process: subprocess.Popen[str]
    told: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, name="up-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append((time.time(), line))

    @property
    def runs_dir(self) -> Path:
        return self.folder.parent

    def status(self) -> dict[str, Any]:
        """Return what `asyncrl status --json` prints, empty while no supervisor answers.

        Asked from here: a command takes half a second of a core, which a run that starts needs.
        """
        handle = attach(RunDir(self.folder))
        snapshot = handle.poll() if handle is not None else HeadWord()
        found: dict[str, Any] = json.loads(json.dumps(values_of(snapshot)))
        return {} if isinstance(snapshot, HeadWord) else found

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        place = ["--run", self.folder.name, "--dir", str(self.runs_dir)]
        return subprocess.run(
            asyncrl_command(*arguments, *place), capture_output=True, text=True, timeout=300, check=False
        )

    def wait_for(self, claim: Callable[[dict[str, Any]], bool], deadline_s: float = 200.0) -> dict[str, Any]:
        """Wait until the run's status fulfils `claim`, and return it."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            status = self.status()
            if status and claim(status):
                return status
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended first:\n{self.finish()[1]}")
            time.sleep(0.3)
        raise AssertionError(f"waited {deadline_s:g} s; the last status was {self.status()}")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self, deadline_s: float = UP_DEADLINE_S) -> tuple[int, str]:
        """Wait for the end; return the exit code and all that was printed."""
        code = self.process.wait(deadline_s)
        self._reader.join(10.0)
        return code, "".join(line for _, line in self.told)

    def told_at(self, *words: str, deadline_s: float = 30.0) -> float:
        """Wait for a line with all these words; return the time at which it came."""
        end = time.monotonic() + deadline_s
        while True:
            for at, line in list(self.told):
                if all(word in line for word in words):
                    return at
            assert time.monotonic() < end, f"no line has {words}: {''.join(line for _, line in self.told)}"
            time.sleep(0.05)

    def page_view(self) -> dict[str, Any]:
        """Return what a browser that opens the page now is shown first."""
        live = json.loads((self.folder / "run.json").read_text())
        address = page_url(live["url"], live["key"]).replace("/?", "/events?")
        with httpx.stream("GET", address, timeout=30.0) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line == "event: view")
            found: dict[str, Any] = json.loads(next(lines).removeprefix("data: "))
            return found

    def end(self) -> None:
        """End what is left of the run, as a test that failed leaves it."""
        from asyncrl.control.machine.processes import end_leftovers, remove_leftovers

        self.process.kill()
        self.process.wait(10)
        if (self.folder / "run.json").exists():
            live = json.loads((self.folder / "run.json").read_text())
            end_leftovers(live["run_id"])
            remove_leftovers(live["run_id"], Path(live["sockets"]))

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the metric rows of learner steps; of a living run the last line may still be on its way."""
        lines = (self.folder / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
        return [row for line in lines if "timing_s/step" in (row := json.loads(line))]


def leftovers(folder: Path) -> list[str]:
    """Return what a run has left: processes, sockets, shared-memory segments and semaphores."""
    from asyncrl.control.machine.processes import pids_of_run, shared_memory_of

    live = json.loads((folder / "run.json").read_text())
    segments = shared_memory_of(live["run_id"])
    sockets = [live["sockets"]] if Path(live["sockets"]).exists() else []
    return [*map(str, pids_of_run(live["run_id"])), *map(str, segments), *sockets]
