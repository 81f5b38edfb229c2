"""Index of the payloads in Redis, by name: `<ticket>:<attempt>:<rank of the buffer that wrote it>`.

Owns the one name that counts for each attempt at a ticket. A buffer never writes a name of another
buffer, so a fenced buffer cannot change a payload that its successor has acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable


class PayloadIndex:
    """See the module.

    >>> index = PayloadIndex([b"7:1:1", b"7:1:2"])
    >>> index.find(7, 1), index.take_outdated()
    ('7:1:2', ['7:1:1'])
    """

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        self._ranks: dict[int, dict[int, int]] = {}
        self._outdated: list[str] = []
        found = [tuple(int(part) for part in name.split(b":")) for name in names]
        for ticket, attempt, rank in sorted(found, key=lambda parts: parts[2]):
            self.add(ticket, attempt, rank)

    def add(self, ticket: int, attempt: int, rank: int) -> str:
        """Add a payload and return its name; an entry of this attempt by a lower rank is outdated."""
        ranks = self._ranks.setdefault(ticket, {})
        older = ranks.get(attempt, rank)
        if older != rank:
            self._outdated.append(_name(ticket, attempt, older))
        ranks[attempt] = rank
        return _name(ticket, attempt, rank)

    def find(self, ticket: int, attempt: int) -> str | None:
        """Return the name of this payload, None if it is not there."""
        rank = self._ranks.get(ticket, {}).get(attempt)
        return None if rank is None else _name(ticket, attempt, rank)

    def remove(self, ticket: int) -> list[str]:
        """Forget a ticket's payloads and return their names."""
        return [_name(ticket, attempt, rank) for attempt, rank in self._ranks.pop(ticket, {}).items()]

    def remove_attempt(self, ticket: int, attempt: int) -> str:
        """Forget one payload and return its name."""
        return _name(ticket, attempt, self._ranks[ticket].pop(attempt))

    def tickets(self) -> Iterable[int]:
        """Return the tickets that have a payload."""
        return self._ranks.keys()

    def take_outdated(self) -> list[str]:
        """Return the names that are not needed, once."""
        taken, self._outdated = self._outdated, []
        return taken


def _name(ticket: int, attempt: int, rank: int) -> str:
    return f"{ticket}:{attempt}:{rank}"
