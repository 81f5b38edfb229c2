"""Coroutines in virtual time: what they wait for, and what wakes them.

Owns no clock: whoever sets a `Ready` decides when. A coroutine of a process that died is closed where it
stands.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any

Task = Coroutine[Any, Any, None]


class Ready:
    """Something that will be there, or will fail, once."""

    __slots__ = ("_error", "_value", "_waiters", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._waiters: list[Callable[[], None]] = []

    def set(self, value: Any = None) -> None:
        """It is there; a second time changes nothing."""
        self._end(value, None)

    def fail(self, error: Exception) -> None:
        """Whoever waits gets the error."""
        self._end(None, error)

    def _end(self, value: Any, error: Exception | None) -> None:
        if self.is_done:
            return
        self.is_done, self._value, self._error = True, value, error
        waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    def then(self, wake: Callable[[], None]) -> None:
        """Call `wake` when it is there, at once if it is."""
        if self.is_done:
            wake()
        else:
            self._waiters.append(wake)

    def __await__(self) -> Generator[Ready, None, Any]:
        if not self.is_done:
            yield self
        if self._error is not None:
            raise self._error
        return self._value


class Bell:
    """Wakes all who wait for the next ring."""

    def __init__(self) -> None:
        self._next = Ready()

    def ring(self) -> None:
        """Wake them."""
        rung, self._next = self._next, Ready()
        rung.set()

    def next_ring(self) -> Ready:
        """Return what the next ring sets."""
        return self._next


class Lock:
    """Lets one task of a process go on at a time."""

    def __init__(self) -> None:
        self._is_held = False
        self._bell = Bell()

    async def __aenter__(self) -> None:
        while self._is_held:
            await self._bell.next_ring()
        self._is_held = True

    async def __aexit__(self, *_: object) -> None:
        self._is_held = False
        self._bell.ring()
