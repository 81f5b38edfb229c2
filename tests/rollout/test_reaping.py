"""Killed child processes whose pipes do not close."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, Process

import psutil
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
        async with asyncio.timeout(30.0):
            await reaping.kill_and_reap(process)
        assert process.returncode == -signal.SIGKILL

    asyncio.run(run())


def test_a_process_whose_pipes_another_one_holds_is_gone_at_once_and_no_pipe_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaping, "END_DEADLINE_S", 60.0)

    async def run() -> int:
        process = await started(LEAVE_A_DAEMON)
        assert process.stdout is not None
        daemon = int(await process.stdout.readline())
        transport = process._transport  # type: ignore[attr-defined]
        pipes = [transport.get_pipe_transport(descriptor).get_extra_info("pipe") for descriptor in (0, 1)]
        async with asyncio.timeout(30.0):
            await reaping.kill_and_reap(process)
        assert process.returncode == -signal.SIGKILL
        await asyncio.sleep(0)  # a pipe's descriptor is closed by the turn after
        assert all(pipe.closed for pipe in pipes)
        return daemon

    os.kill(asyncio.run(run()), signal.SIGKILL)


def test_a_process_that_is_not_gone_in_time_is_logged_and_fails_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reaping, "END_DEADLINE_S", 0.05)

    async def run() -> None:
        process = await started("import time; time.sleep(3600)")
        with monkeypatch.context() as patched:  # as a process in an uninterruptible wait of the kernel
            patched.setattr(os, "kill", lambda *_: None)
            await reaping.kill_and_reap(process)
        assert process.returncode is None and "is not gone after 0.05 s" in caplog.text
        await reaping.kill_and_reap(process)

    asyncio.run(run())


def test_the_exit_status_of_a_process_that_has_just_ended_is_left_to_asyncio_s_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waitpid, may_wait = os.waitpid, threading.Event()

    def wait_late(pid: int, options: int) -> tuple[int, int]:
        assert may_wait.wait(60.0)
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", wait_late)  # `subprocess` has its own reference

    async def run() -> int | None:
        process = await asyncio.create_subprocess_exec("sleep", "60", stdin=PIPE, stdout=PIPE)
        os.kill(process.pid, signal.SIGKILL)
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(0.05, may_wait.set)
        await reaping.kill_and_reap(process)
        return process.returncode

    assert asyncio.run(run()) == -signal.SIGKILL
