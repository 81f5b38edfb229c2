"""Places of a receiver's copies: verified, committed, taken by the engine (pure).

Owns which version stands where; holds no bytes: `memory.shelf` keeps the segments, the planner none.
Invariant: newest wins. A newer verified or committed copy replaces an older one that was not taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from asyncrl.core.staleness import UNLOADED


class Numbered(Protocol):
    """A copy of one version."""

    @property
    def number(self) -> int: ...


C = TypeVar("C", bound=Numbered)


class Copies(Generic[C]):
    """The copies of one receiver.

    Args:
        give_back: Called with a copy that has no place any more.
    """

    def __init__(self, give_back: Callable[[C], None]) -> None:
        self._give_back = give_back
        self._verified: C | None = None
        self._committed: C | None = None
        self._taken: C | None = None

    @property
    def newest_verified(self) -> int:
        """Newest version number that is here, verified and not taken; 0 for none."""
        return max((copy.number for copy in (self._verified, self._committed) if copy), default=UNLOADED)

    @property
    def committed_number(self) -> int:
        """The version number that the engine may take next; 0 for none."""
        return self._committed.number if self._committed else UNLOADED

    @property
    def taken(self) -> C | None:
        """The copy that the engine is loading."""
        return self._taken

    @property
    def taken_number(self) -> int:
        """The version number that the engine is loading; 0 for none."""
        return self._taken.number if self._taken else UNLOADED

    def has(self, copy: C | None) -> bool:
        """Tell whether a copy has a place."""
        return copy in (self._verified, self._committed, self._taken)

    def put_verified(self, copy: C) -> None:
        """Keep a verified copy until its commit."""
        older, self._verified = self._verified, copy
        self._let_go(older)

    def commit(self, number: int) -> None:
        """Let the engine have version `number`, or the newer one that has replaced it."""
        if self._verified is not None and self._verified.number >= number:
            self.commit_verified()

    def commit_verified(self) -> bool:
        """Let the engine have the verified copy, if there is one."""
        if self._verified is None:
            return False
        self._let_go(self._committed)
        self._committed, self._verified = self._verified, None
        return True

    def withdraw(self) -> None:
        """Take back what was committed and not taken; it waits for another commit."""
        older, self._committed = self._committed, None
        self._put_back(older, has_newer=self._verified is not None)

    def take(self, serving: int) -> C | None:
        """Return the copy that an engine serving `serving` should load; the same one if asked again.

        What it serves already, or what is older, makes room.
        """
        if self._taken is not None and self._taken.number <= serving:
            self.finish_load(self._taken.number, is_ok=True)
        if self._committed is not None and self._committed.number <= serving:
            older, self._committed = self._committed, None
            self._let_go(older)
        if self._taken is None:
            self._taken, self._committed = self._committed, None
        return self._taken

    def untake(self) -> None:
        """The engine that had taken a copy is gone; another one may have it."""
        older, self._taken = self._taken, None
        self._put_back(older, has_newer=self._verified is not None or self._committed is not None)

    def finish_load(self, number: int, is_ok: bool) -> None:
        """The engine has loaded version `number`, or failed and must load again."""
        if self._taken is None or self._taken.number != number:
            return
        if not is_ok:
            self.untake()
            return
        older, self._taken = self._taken, None
        self._let_go(older)

    def _put_back(self, copy: C | None, *, has_newer: bool) -> None:
        if copy is not None and not has_newer:
            self._verified = copy
        else:
            self._let_go(copy)

    def _let_go(self, copy: C | None) -> None:
        if copy is not None:
            self._give_back(copy)
