"""One round: one version on its way to one set of members (pure).

Owns who was offered, who accepted, who holds a verified copy, and who is to blame. A round only moves
forward: OFFER → TRANSFER → closed; each phase has a deadline, and a broken group a shorter one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncrl.versions import PolicyVersion

MAX_CACHED_GROUPS = 8


class Phase(StrEnum):
    OFFER = "OFFER"
    TRANSFER = "TRANSFER"


class Part(StrEnum):
    """What a member has done in the round; the last three are final."""

    OFFERED = "OFFERED"
    ACCEPTED = "ACCEPTED"
    RECEIVING = "RECEIVING"
    VERIFIED = "VERIFIED"
    FAILED = "FAILED"
    LEFT_OUT = "LEFT_OUT"


class Sender(StrEnum):
    """What the publisher has done in the round."""

    PENDING = "PENDING"
    SENT = "SENT"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Timing:
    """All deadlines of weight sync, in seconds.

    Attributes:
        deadline_s: A transfer with its verification; a swap.
        offer_s: An answer to an offer.
        settle_s: An answer to an abort, once a group has broken: it tells the living from the culprit.
        silence_s: Without a word for so long, a member is SUSPECT. Members speak every third of it.
        dead_s: Without a word for so long, it is DEAD.
        backoff_s: First wait before another try with a member that failed alone; doubles each time.
    """

    deadline_s: float
    offer_s: float
    settle_s: float
    silence_s: float
    dead_s: float
    backoff_s: float = 0.1

    @staticmethod
    def of(deadline_s: float) -> Timing:
        """Return the usual proportions for `weight_sync.deadline_s`."""
        silence_s = min(3.0, deadline_s)
        return Timing(deadline_s, min(5.0, deadline_s), min(1.0, deadline_s), silence_s, 10 * silence_s)

    @property
    def poll_s(self) -> float:
        """How long a member may be silent while it waits for orders."""
        return self.silence_s / 3


@dataclass
class Round:
    """See the module. `parts` is in rank order: the first member has rank 1."""

    id: int
    version: PolicyVersion
    started: float
    until: float
    parts: dict[str, Part]
    phase: Phase = Phase.OFFER
    membership: int = 0
    sender: Sender = Sender.PENDING
    settle_until: float | None = None
    causes: dict[str, str] = field(default_factory=dict)

    def those(self, *parts: Part) -> list[str]:
        """Return the members whose part is one of `parts`."""
        return [name for name, part in self.parts.items() if part in parts]

    @property
    def is_broken(self) -> bool:
        """Whether the group can no longer be used."""
        return self.settle_until is not None

    @property
    def is_over(self) -> bool:
        """Whether nobody is waited for any more."""
        is_sending = self.phase is Phase.TRANSFER and self.sender is Sender.PENDING
        return not is_sending and not self.those(Part.OFFERED, Part.ACCEPTED, Part.RECEIVING)


@dataclass(frozen=True)
class Order:
    """What a member or the publisher is told to do.

    Kinds: `offer`, `transfer`, `abort`, `commit`, `withdraw`.
    """

    to: str
    kind: str
    fields: dict[str, Any]


class GroupCache:
    """Numbers of the groups that members may keep open, by their (name, incarnation) in rank order.

    Invariant: a number is added once, for one ordered set of processes.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[tuple[tuple[str, str], ...], int] = OrderedDict()

    @property
    def live(self) -> list[int]:
        return list(self._numbers.values())

    def find(self, key: tuple[tuple[str, str], ...]) -> int | None:
        """Return the number of a group that is open already."""
        if key in self._numbers:
            self._numbers.move_to_end(key)
        return self._numbers.get(key)

    def add(self, key: tuple[tuple[str, str], ...], number: int) -> int:
        """Note a new group; the one that was not used for longest goes."""
        self._numbers[key] = number
        while len(self._numbers) > MAX_CACHED_GROUPS:
            self._numbers.popitem(last=False)
        return number

    def drop(self, number: int) -> None:
        """The group has broken."""
        self._numbers = OrderedDict((key, n) for key, n in self._numbers.items() if n != number)

    def forget(self, name: str) -> None:
        """The member is gone, and its groups with it."""
        for key in [key for key in self._numbers if any(member == name for member, _ in key)]:
            del self._numbers[key]

    def clear(self) -> None:
        """The publisher is gone."""
        self._numbers.clear()
