"""The end of a child process of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.subprocess import Process

log = logging.getLogger(__name__)

END_DEADLINE_S = 5.0


async def kill_and_reap(process: Process) -> None:
    """Kill a process, close its pipes and wait until it is gone; log a warning after `END_DEADLINE_S`.

    `Process.wait` also waits for the pipes: without end while output is unread, or while another process
    that the killed one has started holds them.
    """
    if process.returncode is None:
        # Not `Process.kill`, which asks for the exit status: asyncio's own thread would miss it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    transport: asyncio.SubprocessTransport = process._transport  # type: ignore[attr-defined]
    for descriptor in (0, 1, 2):
        if (pipe := transport.get_pipe_transport(descriptor)) is not None:
            pipe.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_DEADLINE_S)
    if process.returncode is None:
        log.warning("process %d was killed and is not gone after %g s", process.pid, END_DEADLINE_S)
