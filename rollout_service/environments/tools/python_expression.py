"""Python expressions, evaluated by child processes that have next to nothing.

A child (`expression_child.py`) knows no imports, no attributes and no names of ours, no environment,
limits its own memory and time, and is killed when it does not answer. A few are kept warm. Invariant: a
child that was cut short, for whatever reason, answers nobody else.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from asyncrl.core.errors import ConfigError
from asyncrl.core.states import Reason
from rollout_service.environments.protocol import EnvironmentFailed
from rollout_service.environments.tools.tool import Tool, ToolExhausted, ToolRefused
from rollout_service.reaping import kill_and_reap

CHILD = Path(__file__).with_name("expression_child.py")
CHILD_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""Nothing else: an expression with a set of texts says the same in every child."""
MAX_CHARS = 2000
MAX_LINE_BYTES = 1 << 16
MIN_MEMORY_BYTES = 64 << 20
BUSY_SHARE = 0.1
"""Of its time that a late expression has computed for, or it is not to blame: it has nothing to wait for."""


class PythonExpression(Tool):
    """The tool `python`.

    Args:
        timeout_s: Time limit of one expression, by the clock; its process is killed then.
        memory_bytes: Memory limit of a process, the interpreter's 20 MB included.
        processes: Most of them at once; further calls wait.

    Raises:
        ConfigError: Nothing could be evaluated within these limits.
    """

    name = "python"
    description = "Evaluates a Python expression: arithmetic, lists, comprehensions, math.*, sum, sorted."
    argument = "expression"
    is_idempotent = True

    def __init__(self, timeout_s: float = 2.0, memory_bytes: int = 256 << 20, processes: int = 2) -> None:
        if timeout_s <= 0 or memory_bytes < MIN_MEMORY_BYTES or processes < 1:
            raise ConfigError(
                "the tool 'python' cannot work within these limits",
                hint="timeout_s above 0, memory_bytes of 64 MiB or more, processes from 1",
            )
        self._timeout_s = timeout_s
        self._limits = (str(memory_bytes), str(math.ceil(timeout_s)))
        self._permits = asyncio.Semaphore(processes)
        self._idle: list[Process] = []

    async def call(self, text: str) -> str:
        if len(text) > MAX_CHARS:
            raise ToolRefused(f"at most {MAX_CHARS} characters")
        async with self._permits:
            line = await self._ask(text)
        if not line:
            raise ToolExhausted("it took too much time or memory")
        found = json.loads(line)
        if not found["ok"]:
            raise ToolRefused(found["text"])
        return str(found["text"])

    async def close(self) -> None:
        """Kill the processes that wait. Without this they end when their input does: with this process."""
        while self._idle:
            await kill_and_reap(self._idle.pop())

    async def _ask(self, text: str) -> bytes:
        """Return the child's line, empty if it ended instead."""
        child = self._idle.pop() if self._idle else await self._start()
        before_s = _cpu_s(child.pid)
        assert child.stdin is not None and child.stdout is not None, "both are pipes"
        line = b""
        try:
            async with asyncio.timeout(self._timeout_s):
                child.stdin.write(json.dumps(text).encode() + b"\n")
                line = await child.stdout.readline()
        except TimeoutError:
            if (busy_s := _cpu_s(child.pid) - before_s) < BUSY_SHARE * self._timeout_s:
                what = (
                    f"an expression computed for {busy_s:.2f} s in {self._timeout_s:g} s: the machine is busy"
                )
                raise EnvironmentFailed(what, reason=Reason.TIMEOUT) from None
            raise ToolExhausted(f"it took longer than {self._timeout_s:g} s") from None
        finally:
            if line:
                self._idle.append(child)
            else:  # late, cancelled or dead
                await kill_and_reap(child)
        return line

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-s", "-S", str(CHILD), *self._limits),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=CHILD_ENVIRONMENT,
            cwd="/",
            limit=MAX_LINE_BYTES,
        )


def _cpu_s(pid: int) -> float:
    """Return the seconds that a process has computed for, 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
