"""Process crew of a compared way: its start, turns, processor time and virtual environment.

Owns the processes: they end with the crew, however it ends. A peer whose packages are not ours runs in
an environment of its own, made once from where this machine's pip is configured to look; what cannot
be had is reported in pip's words.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from asyncrl.core.errors import AsyncrlError, ServiceFailed
from benchmarks.buffer.peers.load import Turn

ROOT = Path.cwd()
INSTALL_DEADLINE_S = 900.0
ANSWER_DEADLINE_S = 40.0
CONNECT_S = 0.4
"""Time for processes to connect before producers begin."""
LONGEST_TURN_S = 60.0
"""A way that delivers nothing in as long a turn has failed."""


@dataclass(frozen=True)
class Figures:
    """Figures of one turn.

    Attributes:
        per_s: Trajectories delivered and decoded, per second.
        cpu_s_per_1000: Processor seconds of all the way's processes per 1,000 trajectories.
        seconds: Of the turn, without what does not count.
        latencies_s: From when an entry was due until the consumer had decoded it; of paced turns.
    """

    per_s: float
    cpu_s_per_1000: float
    seconds: float
    latencies_s: tuple[float, ...] = ()

    def are_taken(self, turn: Turn) -> bool:
        """Return whether something was delivered, and a latency measured if the turn is paced."""
        return self.per_s > 0 and bool(self.latencies_s or not turn.groups_per_s)


class Crew:
    """The processes of one way: one that serves, producers, consumers.

    Args:
        module, name: Where the way's class is.
        python: The interpreter that has its packages.
    """

    def __init__(
        self,
        module: str,
        name: str,
        python: str = sys.executable,
        log: Path | None = None,
    ) -> None:
        self._command = [python, "-m", "benchmarks.buffer.peers.worker", module, name]
        self._log = log.open("w") if log else None
        self._workers: dict[str, subprocess.Popen[str]] = {}

    def run(self, turn: Turn, seconds: float, warm_s: float) -> Figures:
        """Run one turn of `seconds`, after `warm_s` that do not count.

        A turn in which nothing was measured tells of the machine and not of the way: it is run again, twice
        as long.

        Raises:
            ServiceFailed: A process reported an error or ended, or the longest turn delivered nothing.
        """
        while not (figures := self._run(turn, seconds, warm_s)).are_taken(turn):
            seconds *= 2
            if seconds > LONGEST_TURN_S:
                raise ServiceFailed(f"nothing was delivered within {seconds / 2:g} s")
            turn = replace(turn, name=f"{turn.name}-again")
        return figures

    def _run(self, turn: Turn, seconds: float, warm_s: float) -> Figures:
        address = self._ask("server", {"do": "open", "turn": turn.as_values()})
        try:
            return self._measure(turn, address, seconds, warm_s)
        finally:
            self._ask("server", {"do": "close"})

    def _measure(self, turn: Turn, address: str, seconds: float, warm_s: float) -> Figures:
        roles = [("produce", index) for index in range(turn.num_producers)]
        roles += [("consume", index) for index in range(turn.num_consumers)]
        for role, index in roles:
            self._tell(f"{role}.{index}", {"do": "connect", "address": address})
        for role, index in roles:
            self._hear(f"{role}.{index}")  # a new process has taken its time
        start_s = time.monotonic() + CONNECT_S
        turn = replace(turn, start_s=start_s, warm_s=start_s + warm_s, stop_s=start_s + warm_s + seconds)
        order = {"turn": turn.as_values(), "address": address}
        for role, index in roles:
            self._tell(f"{role}.{index}", {**order, "do": role, "index": index})
        time.sleep(max(0.0, turn.warm_s - time.monotonic()))
        cpu_s = -self._cpu_s()
        time.sleep(max(0.0, turn.stop_s - time.monotonic()))
        cpu_s += self._cpu_s()
        logs = {
            role: [self._hear(f"{role}.{i}") for r, i in roles if r == role]
            for role in ("produce", "consume")
        }
        return _figures(turn, logs, cpu_s)

    def _worker(self, name: str) -> subprocess.Popen[str]:
        if name not in self._workers:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            self._workers[name] = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log or subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env=environment,
            )
        return self._workers[name]

    def _tell(self, name: str, order: dict[str, Any]) -> None:
        stream = self._worker(name).stdin
        assert stream is not None
        stream.write(json.dumps(order) + "\n")
        stream.flush()

    def _hear(self, name: str) -> Any:
        stream = self._worker(name).stdout
        assert stream is not None
        waiting = select.poll()
        waiting.register(stream, select.POLLIN)
        if not waiting.poll(ANSWER_DEADLINE_S * 1000):
            raise ServiceFailed(f"the process '{name}' gave no answer within {ANSWER_DEADLINE_S:g} s")
        line = stream.readline()
        if not line:
            raise ServiceFailed(f"the process '{name}' ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ServiceFailed(f"{name}: {answer['error']}")
        return answer["result"]

    def _ask(self, name: str, order: dict[str, Any]) -> Any:
        self._tell(name, order)
        return self._hear(name)

    def _cpu_s(self) -> float:
        total = 0.0
        for worker in self._workers.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(worker.pid)
                for one in [process, *process.children(recursive=True)]:
                    times = one.cpu_times()
                    total += times.user + times.system
        return total

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers.values():
            try:
                worker.wait(20.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()
        if self._log:
            self._log.close()


def _figures(turn: Turn, logs: dict[str, list[dict[str, Any]]], cpu_s: float) -> Figures:
    count = sum(log["num_trajectories"] for log in logs["consume"])
    began = {number: at for log in logs["produce"] for number, at in log["times"]}
    arrived = ((number, at) for log in logs["consume"] for number, at in log["times"])
    latencies = tuple(at - began[number] for number, at in arrived if began.get(number, 0.0) >= turn.warm_s)
    seconds = turn.stop_s - turn.warm_s
    return Figures(count / seconds, 1000.0 * cpu_s / max(1, count), seconds, latencies)


def percentile_s(latencies: Sequence[float], percent: float) -> float:
    """Return the percentile of `latencies`, nan without any."""
    return float(np.percentile(latencies, percent)) if latencies else float("nan")


class PeerMissing(AsyncrlError):
    """A peer that cannot be installed here; the message is pip's."""


def cache_folder() -> Path:
    """Return where environments are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "asyncrl" / "buffer_peers"


def make_environment(name: str, packages: Sequence[str], folder: Path) -> str:
    """Return the interpreter of an environment with `packages`; our own one without any.

    Raises:
        PeerMissing: pip could not install them.
    """
    if not packages:
        return sys.executable
    digest = hashlib.sha256("\n".join([sys.version, *packages]).encode()).hexdigest()[:12]
    home = folder / f"{name}-{digest}"
    python, stamp = home / "bin" / "python", home / ".is-made"
    if not stamp.exists():
        venv.create(home, with_pip=False, clear=True)
        _install(python, packages)
        stamp.touch()
    return str(python)


def _install(python: Path, packages: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise PeerMissing(f"pip took longer than {INSTALL_DEADLINE_S:g} s for {' '.join(packages)}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
        raise PeerMissing(f"pip: {lines[-1].strip()[:300]}")
