"""State of a replica as its loops share it: moves, counters, the event of a change, repeated calls.

    STARTING -> SYNCING -> READY -> DRAINING -> RETIRED      READY <-> PINNED (evaluation)
    READY -> SYNCING when a load failed: generation is paused until one works

Invariant: a replica that drains goes back to no other state.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncrl.buffer.rules import replica as rules
from asyncrl.buffer.rules.replica import Tries
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded
from rollout_service.replica.states import State

log = logging.getLogger(__name__)

T = TypeVar("T")


class Lifecycle:
    """See the module. One event loop moves it; other threads may read it.

    Args:
        name: Of the service.
        is_standby: It takes neither leases nor evaluations until it is promoted.

    Attributes:
        changed: Set when something happened after which a lease may be due.
        on_change: Called before that; tells the engine's meter what the replica waits for.
    """

    def __init__(self, name: str, *, is_standby: bool = False) -> None:
        self.name = name
        self.is_standby = is_standby
        self.state = State.STARTING
        self.counters: Counter[str] = Counter()
        self.changed = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None

    def move(self, state: State) -> None:
        """Be in `state` from now on."""
        if self.state is State.DRAINING and state is not State.RETIRED:
            return
        if state is not self.state:
            log.info("%s: %s -> %s", self.name, self.state, state)
        self.state = state
        self.note_change()

    def note_change(self) -> None:
        """Wake the lease loop: a group, a version, the fence or the state is another one."""
        self.on_change()
        self.changed.set()

    async def note(self, counter: str, error: AsyncrlError) -> None:
        """Count and log an error that a retry may cure, and wait a little."""
        self.counters[counter] += 1
        log.warning("%s: %s", counter, error)
        await asyncio.sleep(rules.RETRY_PAUSE_S)

    async def repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call that may be repeated until it is answered, or its tries are spent."""
        tries = Tries()
        while True:
            try:
                return await call()
            except DeadlineExceeded as error:
                if not tries.may_repeat():
                    raise
                await self.note("calls_repeated", error)
