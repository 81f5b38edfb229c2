"""Fork server of vLLM's engine core, which imports vLLM while the front end imports it too.

Inside a Ray actor vLLM spawns its core, which then imports everything once more, after the front end:
10 s of one processor each, one after the other. Here a fork server imports at once, and the core is
forked from it. It never starts a thread or a device, so forking it is safe. Owns the fork server of
this process. On GPUs vLLM's own way stays: a start takes minutes there, and devices must come first.
"""

from __future__ import annotations

import contextlib
import gc
import os
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
