"""Process of vLLM's engine core: its fork server, and the exception that it died of.

Inside a Ray actor vLLM spawns its core, which then imports everything once more, after the front end:
10 s of one processor each, one after the other. Here a fork server imports at once, and the core is
forked from it. It never starts a thread or a device, so forking it is safe. Owns the fork server of this
process. On GPUs vLLM's own way stays: a start takes minutes there, and devices must come first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import stat
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, ClassVar

PRELOADED = ["rollout_service.engine.vllm.core.modules"]


def start_forkserver() -> None:
    """Start the fork server, which imports vLLM in the background. The environment must be set by now."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Within the block no garbage is collected; what it leaves is never searched for any.

    Of the 14 s of a processor that vLLM's import takes, 3 s are collections that find nothing.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_enabled:
            gc.enable()


@contextlib.contextmanager
def forked_cores() -> Iterator[None]:
    """Within the block vLLM forks its engine core from the forkserver instead of spawning it."""
    import vllm.v1.engine.utils as starter

    spawning = starter.get_mp_context
    starter.get_mp_context = CoreContext
    try:
        yield
    finally:
        starter.get_mp_context = spawning


class _Child(ForkServerProcess):
    """A process that gets the environment of its starter, as a spawned one would."""

    _environment: dict[str, str]

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.update(self._environment)
        super().run()


class CoreContext(ForkServerContext):
    """The multiprocessing context whose processes are forked from the forkserver."""

    Process: ClassVar[Any] = _Child


MAX_BYTES = 1 << 20
STANDARD_ERROR = 2
_WRITER = r"^\((?:EngineCore|Worker)[^)]*\)"
_LOGGER = r"(?: [A-Z]+ \S+ \S+ \[[^\]]*\])?"
_LAST_LINE = re.compile(rf"{_WRITER}{_LOGGER} ([A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*)$")
"""Of a traceback: its code is indented further."""


class CoreLog:
    """Output of the engine core since this object was made, in the log that it shares with this process.

    vLLM's front end says "see stack trace (above)" where its core died; what the core died of is only in the
    lines that the core wrote: in the file behind standard error.

    Args:
        descriptor: Of the log, open for whatever; no regular file tells nothing.
    """

    def __init__(self, descriptor: int = STANDARD_ERROR) -> None:
        self._descriptor = descriptor
        self._start = self._size() or 0

    def last_exception(self) -> str:
        """Return the last line of the core's last traceback, empty if there is none."""
        size = self._size()
        if size is None:
            return ""
        start = max(self._start, size - MAX_BYTES)
        with open(f"/proc/self/fd/{self._descriptor}", "rb") as file:
            text = os.pread(file.fileno(), size - start, start).decode(errors="replace")
        return find_last_exception(text)

    def _size(self) -> int | None:
        try:
            found = os.fstat(self._descriptor)
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None


def find_last_exception(text: str) -> str:
    """Return the last exception line that an engine core or one of its workers wrote into `text`.

    >>> find_last_exception("(EngineCore pid=7) ERROR 11-23 18:57:30 [core.py:15] RuntimeError: head_dim=16")
    'RuntimeError: head_dim=16'
    """
    found = (_LAST_LINE.match(line) for line in text.splitlines())
    return next((match[1] for match in reversed([one for one in found if one])), "")
