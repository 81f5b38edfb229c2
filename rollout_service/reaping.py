"""The end of a killed child process of an event loop."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process

END_DEADLINE_S = 5.0


async def reap(process: Process) -> None:
    """Wait until a killed process is gone; what it has written is thrown away.

    `Process.wait` alone returns when the pipes are closed, too: never, while output is unread, or while a
    process that the killed one has started holds them. For such a one this waits `END_DEADLINE_S`.
    """
    try:
        async with asyncio.timeout(END_DEADLINE_S):
            await process.communicate()
    except TimeoutError:
        if process.returncode is None:
            raise
