"""Services of a test in threads of its process: run, and ended with the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.core.runtime.interface import Event
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime

END_S = 30.0
RUNTIME = ThreadRuntime()


@contextmanager
def in_thread(run: Callable[[Event], object]) -> Iterator[Event]:
    """Call `run` with the event that ends it, in a thread; at the end set it and wait for the thread."""
    stop = ThreadEvent()
    thread = threading.Thread(target=run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(END_S)
        assert not thread.is_alive(), "it did not end"
