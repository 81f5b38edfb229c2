"""The end of a child process of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio.subprocess import Process

log = logging.getLogger(__name__)

END_DEADLINE_S = 5.0


async def kill(process: Process) -> None:
    """Kill a process, hang up on who holds its pipes, and wait until it is gone; a longer end is logged.

    `Process.wait` alone returns when the pipes are closed, too: never, while output is unread, or while
    another process that the killed one has started holds them.
    """
    process._transport.close()  # type: ignore[attr-defined]  # nothing public closes the pipes
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_DEADLINE_S)
    if process.returncode is None:
        log.warning("process %d was killed and is not gone after %g s", process.pid, END_DEADLINE_S)
