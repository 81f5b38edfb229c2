"""A process beside the replica that answers one request at a time, over its standard input and output.

Owns the process: it is killed with all that it started when a request takes too long, and ends by itself
when the replica does. Invariant: requests and answers are plain values; nothing that comes back is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

from asyncrl.core.errors import AsyncrlError, ConfigError
from rollout_service.rewards.served.frames import HEAD_BYTES, body_bytes, pack_frame, unpack_body
from rollout_service.rewards.served.processes.surroundings import allowed_environment

ROOT = Path(__file__).resolve().parents[4]
END_DEADLINE_S = 5.0


class ChildDied(AsyncrlError, RuntimeError):
    """The process ended before it had answered."""


class Child:
    """A started process. Only one request may be under way."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_group_ended = False

    @classmethod
    async def start(cls, module: str, settings: Mapping[str, object], deadline_s: float) -> Child:
        """Start `python -m module` and wait until it is ready.

        Raises:
            ConfigError: It says that it cannot use `settings`.
            ChildDied: It ended.
            TimeoutError: It was not ready after `deadline_s`.
        """
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            env={**allowed_environment(os.environ), "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is not for it, and all that it starts can be killed at once
        )
        child = cls(process)
        try:
            hello = await child.ask(settings, deadline_s)
        except BaseException:  # cancelled, too: nobody else knows of the process
            await child.kill()
            raise
        if "refused" in hello:
            await child.close()
            raise ConfigError(str(hello["refused"]))
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: Mapping[str, object], deadline_s: float) -> dict[str, object]:
        """Send a request and return its answer. After an error the process must be killed.

        Raises:
            ValueError: The request holds something else than plain values.
            ChildDied: The process ended.
            TimeoutError: There was no answer within `deadline_s`.
        """
        frame = pack_frame(request)
        writing, reading = self._process.stdin, self._process.stdout
        assert writing is not None and reading is not None, "both are pipes"
        try:
            async with asyncio.timeout(deadline_s):
                writing.write(frame)
                await writing.drain()
                head = await reading.readexactly(HEAD_BYTES)
                return unpack_body(await reading.readexactly(body_bytes(head)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildDied(f"process {self.pid} ended before it had answered") from error

    async def kill(self) -> None:
        """End the process and all that it started, at once; also what it left when it ended by itself."""
        self._end_group()
        await self._process.wait()

    async def close(self) -> None:
        """Let the process end, and kill it if it does not."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), END_DEADLINE_S)
        await self.kill()

    def _end_group(self) -> None:
        if self._is_group_ended:
            return  # the number may be another's by now
        self._is_group_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
