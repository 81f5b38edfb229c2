"""A watchdog for tasks that never wait: virtual time stands still while one runs, so the processor's counts.

Invariant: the timer and the handler of the process are as before when it ends.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

from tests.simulation.kernel.world import Stuck, World

LOOK_S = 5.0
"""Of processor time, between two looks; a task that still runs at the second one is stuck."""


@contextlib.contextmanager
def watched(world: World, look_s: float = LOOK_S) -> Iterator[None]:
    """Raise `Stuck` in a task that runs from one look to the next without a wait."""
    seen, since_s = -1, 0.0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal seen, since_s
        now_s = time.thread_time()
        if seen != world.num_events or world.current is None:
            seen, since_s = world.num_events, now_s
        elif now_s - since_s > look_s / 2:  # a timer that catches up strikes twice in a row
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
            raise Stuck(f"{world.current.process}/{world.current.name} never waits, at {where}")

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, look_s, look_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
