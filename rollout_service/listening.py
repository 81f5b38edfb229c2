"""Events of a runtime, which other threads set, for an event loop."""

from __future__ import annotations

import asyncio
import contextlib

from asyncrl.core.runtime.interface import Event


def listen_to(*events: Event) -> asyncio.Event:
    """Return what is set in the running loop whenever one of `events` is set, or was before."""
    loop, has_heard = asyncio.get_running_loop(), asyncio.Event()

    def hear() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has all ended
            loop.call_soon_threadsafe(has_heard.set)

    for event in events:
        event.on_set(hear)
    return has_heard
