"""Killed child processes whose pipes do not close."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

import pytest

from rollout_service import reaping

FLOOD = "import os\nwhile True: os.write(1, bytes(1 << 16))"
LEAVE_A_DAEMON = """
import subprocess, time
daemon = subprocess.Popen(["sleep", "3600"], start_new_session=True, stdin=subprocess.DEVNULL)
print(daemon.pid, flush=True)
time.sleep(3600)
"""


async def started(program: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE, stdout=PIPE)


def test_a_process_with_unread_output_is_reaped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaping, "END_DEADLINE_S", 60.0)

    async def run() -> None:
        process = await started(FLOOD)
        assert process.stdout is not None
        await process.stdout.readexactly(1 << 20)  # by now the transport has stopped to read, or soon does
        await asyncio.sleep(0.2)
        process.kill()
        async with asyncio.timeout(30.0):
            await reaping.reap(process)
        assert process.returncode == -signal.SIGKILL

    asyncio.run(run())


def test_a_process_whose_pipe_another_one_holds_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaping, "END_DEADLINE_S", 1.0)

    async def run() -> int:
        process = await started(LEAVE_A_DAEMON)
        assert process.stdout is not None
        daemon = int(await process.stdout.readline())
        process.kill()
        async with asyncio.timeout(60.0):
            await reaping.reap(process)
        assert process.returncode == -signal.SIGKILL
        return daemon

    os.kill(asyncio.run(run()), signal.SIGKILL)
