"""One round: one version on its way to one set of members (pure).

Owns the progress of each member and the attribution of a failure. A round only moves
forward: OFFER → TRANSFER → closed; each phase has a deadline, and a broken group a shorter one.
Invariant: from its offer to its end a round takes at most `Timing.deadline_s`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from asyncrl.core.rpc.message import fields_of
from asyncrl.core.staleness import PolicyVersion
from weight_sync.protocol.lanes.stripes import WHOLE, Stripe
from weight_sync.protocol.messages import Instruction, Transfer

MAX_CACHED_GROUPS = 8
TRANSPORT, DEADLINE, DIGEST, SILENT = "transport", "deadline", "digest", "silent"
STORE = "store"
"""Begins the cause of who could not write or read the store; what was wrong with it follows."""
STALLED = "stalled"
PUBLISHER_LOST, SUPERSEDED, LEFT, ABORTED = "publisher_lost", "superseded", "left", "aborted"
LATE_MAP = "a copy of its node not verified in time"
NEVER = -1.0
"""For how long a publisher has been sending that has not begun, in seconds."""
STANDS_STILL = "no progress"
OVERDUE = (DEADLINE, STALLED)
"""Causes of a round that took too long, as a whole or since its last progress."""
ASKING_CAUSES = (TRANSPORT, *OVERDUE)
"""Causes for which the publisher may be the culprit as well as a member, so both must answer."""


class Lane(StrEnum):
    """Rounds run side by side, at most one of each stripe in each of the first three lanes and in DIRECT.

    A member is in one round of each stripe, besides those that it has left or is done with.
    """

    MAIN = "MAIN"
    """Lane of all members that can take the newest version."""
    JOINERS = "JOINERS"
    """Members that have nothing yet, while a main round runs: they do not wait for its end."""
    LONE = "LONE"
    """One member that transfers broke with or were late with: the others do not wait for it."""
    FOLDER = "FOLDER"
    """One member that reads the folder, however slowly: those of its node alone wait for its copy."""
    DIRECT = "DIRECT"
    """Members whose engines get their parts from the learner's ranks themselves."""
    MAPPED = "MAPPED"
    """Members that map the copy of a process of their node; any number of rounds, and none is awaited."""


class Phase(StrEnum):
    OFFER = "OFFER"
    TRANSFER = "TRANSFER"


class Part(StrEnum):
    """Progress of a member in the round; the last four are final. LEFT went of its own accord."""

    OFFERED = "OFFERED"
    ACCEPTED = "ACCEPTED"
    RECEIVING = "RECEIVING"
    VERIFIED = "VERIFIED"
    FAILED = "FAILED"
    LEFT_OUT = "LEFT_OUT"
    LEFT = "LEFT"


OPEN_PARTS = (Part.OFFERED, Part.ACCEPTED, Part.RECEIVING)
FINAL_PARTS = (Part.VERIFIED, Part.FAILED, Part.LEFT_OUT, Part.LEFT)


class Sender(StrEnum):
    """Progress of the publisher in the round."""

    PENDING = "PENDING"
    SENT = "SENT"
    FAILED = "FAILED"


RESERVE_BYTES_PER_S, TRANSFER_BYTES_PER_S, FOLDER_BYTES_PER_S = 0.5e9, 0.25e9, 0.02e9
"""The slowest that a host is waited for: pages come at about 2e9, gloo carries 0.7e9 to 2e9 to a receiver.
Who reads the folder may be far from it, and nobody waits for that one."""
MAX_BUCKET_BYTES = 1 << 30
"""The largest `weight_sync.bucket_bytes`: progress is told bucket by bucket."""


@dataclass(frozen=True)
class Timing:
    """All deadlines of weight sync, in seconds, without those of a version's bytes (`for_bytes`).

    Attributes:
        deadline_s: A round from its offer to its end, the settling of a broken one included; a swap.
        offer_s: An answer to an offer: a receiver reserves a segment for it.
        settle_s: An answer to an abort, once a group has broken: it tells the living from the culprit.
        silence_s: Without a word for so long, a member is SUSPECT. Members speak every third of it.
        dead_s: Without a word for so long, it is DEAD.
        backoff_s: First wait before another try with a member that failed alone; doubles each time.
        stall_s: Without progress for so long, a member or a round stands still, however late its deadline is.
    """

    deadline_s: float
    offer_s: float
    settle_s: float
    silence_s: float
    dead_s: float
    backoff_s: float = 0.1
    stall_s: float = math.inf

    @staticmethod
    def of(deadline_s: float) -> Timing:
        """Return the usual proportions for `weight_sync.deadline_s`."""
        silence_s = min(3.0, deadline_s)
        return Timing(
            deadline_s=deadline_s,
            offer_s=deadline_s / 4,
            settle_s=min(1.0, deadline_s / 8),
            silence_s=silence_s,
            dead_s=10 * silence_s,
            stall_s=max(deadline_s / 4, 2 * silence_s),
        )

    @property
    def poll_s(self) -> float:
        """Time that a member may be silent while it waits for orders."""
        return self.silence_s / 3

    def for_bytes(self, num_bytes: int, bytes_per_s: float = TRANSFER_BYTES_PER_S) -> Timing:
        """Return the deadlines of a version of that size: these, and what its bytes take at the slowest."""
        reserve_s, transfer_s = num_bytes / RESERVE_BYTES_PER_S, num_bytes / bytes_per_s
        return replace(
            self,
            offer_s=self.offer_s + reserve_s,
            deadline_s=self.deadline_s + reserve_s + transfer_s,
            stall_s=self.stall_s + min(num_bytes, MAX_BUCKET_BYTES) / bytes_per_s,
        )


@dataclass
class Round:
    """See the module. `parts` is in rank order: the first member has rank 1.

    Attributes:
        stripe: Of the version, that it brings.
        receivers: Members at the start of the transfer.
        transfer: Order of the transfer, as the publisher got it.
        until: End of the phase.
        broken_at: Time at which the group was given up; all members then answer by `settle_until`.
        look_at: Nobody who is waited for has been silent, or stood still, for too long before.
        has_publisher_spoken: The publisher was heard after that.
        causes: Cause of failure of a member, or under `PUBLISHER` of the whole round.
        progress: Steps that each member has told of (pieces of memory, then buckets), and when the last one
            came; without any, the phase's beginning counts, `phase_began`.
        holder: Process whose copy the members of a MAPPED round map; `holder_incarnation` tells which.
    """

    id: int
    lane: Lane
    version: PolicyVersion
    started: float
    until: float
    parts: dict[str, Part]
    phase: Phase = Phase.OFFER
    membership: int = 0
    receivers: tuple[str, ...] = ()
    transfer: Transfer | None = None
    sender: Sender = Sender.PENDING
    num_bytes: int = 0
    broken_at: float | None = None
    broken_by: str = ""
    settle_until: float | None = None
    has_publisher_spoken: bool = False
    causes: dict[str, str] = field(default_factory=dict)
    culprits: list[str] = field(default_factory=list)
    look_at: float = -math.inf
    phase_began: float = 0.0
    progress: dict[str, tuple[int, float]] = field(default_factory=dict)
    holder: str = ""
    holder_incarnation: str = ""
    stripe: Stripe = WHOLE

    def __post_init__(self) -> None:
        self._counts = Counter(self.parts.values())

    def set_part(self, name: str, part: Part) -> None:
        """Note a member's progress."""
        self._counts[self.parts[name]] -= 1
        self._counts[part] += 1
        self.parts[name] = part

    def has(self, *parts: Part) -> bool:
        """Tell whether the part of a member is one of `parts`."""
        return any(self._counts[part] for part in parts)

    def those(self, *parts: Part) -> list[str]:
        """Return the members whose part is one of `parts`."""
        return [name for name, part in self.parts.items() if part in parts]

    def has_left(self, name: str) -> bool:
        """Whether the member is out of the round and of its attribution."""
        is_done = self.is_mapped and self.parts.get(name) in FINAL_PARTS
        return is_done or self.parts.get(name) is Part.LEFT

    @property
    def is_mapped(self) -> bool:
        """Whether no byte is sent: there is no group that could break, and no member waits for another."""
        return self.lane is Lane.MAPPED

    @property
    def is_direct(self) -> bool:
        """Whether learner ranks send to engine workers; who is not reached gets the version staged."""
        return self.lane is Lane.DIRECT

    @property
    def is_broken(self) -> bool:
        """Whether the group can no longer be used."""
        return self.settle_until is not None

    @property
    def awaits_publisher(self) -> bool:
        """Whether the publisher may be the one that broke the round: it has sent no heartbeat since."""
        return self.is_broken and self.broken_by in ASKING_CAUSES and not self.has_publisher_spoken

    @property
    def is_over(self) -> bool:
        """Whether no answer is pending any more."""
        is_sending = self.phase is Phase.TRANSFER and self.sender is Sender.PENDING
        return not is_sending and not self.has(*OPEN_PARTS) and not self.awaits_publisher

    @property
    def has_spoilt_group(self) -> bool:
        """Whether its group must not be used again: it broke, or one of its members was aborted."""
        return self.is_broken or any(self.parts[name] is Part.LEFT_OUT for name in self.receivers)

    def note_progress(self, name: str, num_steps: int, now: float) -> None:
        """A member tells how far it is; only more than before counts."""
        if num_steps > self.progress.get(name, (0, now))[0]:
            self.progress[name] = num_steps, now

    def moved_at(self, *names: str) -> float:
        """Return when one of `names` made progress last."""
        times = [self.progress[name][1] for name in names if name in self.progress]
        return max([self.phase_began, *times])

    def shift(self, seconds: float) -> None:
        """Put its deadlines off by a time in which the coordinator did not run."""
        self.until += seconds
        self.phase_began += seconds
        self.progress = {name: (num, at + seconds) for name, (num, at) in self.progress.items()}
        if self.settle_until is not None:
            self.settle_until += seconds


@dataclass(frozen=True)
class Order:
    """Order to a member or the publisher."""

    to: str
    what: Instruction

    @property
    def kind(self) -> str:
        return self.what.kind

    @property
    def fields(self) -> dict[str, Any]:
        """As they travel."""
        return fields_of(self.what)


class GroupCache:
    """Numbers of the groups that members may keep open, by their (name, incarnation) in rank order.

    Invariant: a number is added once, for one ordered set of processes.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[tuple[tuple[str, str], ...], int] = OrderedDict()
        self._names: dict[int, frozenset[str]] = {}

    def live(self, in_use: Iterable[int]) -> list[int]:
        """Return the numbers that are open, and those that rounds are using."""
        return sorted({*self._numbers.values(), *in_use} - {0})

    def find(self, key: tuple[tuple[str, str], ...]) -> int | None:
        """Return the number of a group that is open already."""
        if key in self._numbers:
            self._numbers.move_to_end(key)
        return self._numbers.get(key)

    def add(self, key: tuple[tuple[str, str], ...], number: int, num_stripes: int = 1) -> int:
        """Note a new group; the one that was not used for longest goes."""
        self._numbers[key], self._names[number] = number, frozenset(name for name, _ in key)
        while len(self._numbers) > MAX_CACHED_GROUPS * num_stripes:
            self._names.pop(self._numbers.popitem(last=False)[1])
        return number

    def drop(self, number: int) -> None:
        """The group has broken."""
        self._names.pop(number, None)
        self._numbers = OrderedDict((key, n) for key, n in self._numbers.items() if n in self._names)

    def forget(self, name: str) -> None:
        """The member is gone, and its groups with it."""
        for number in [number for number, names in self._names.items() if name in names]:
            self.drop(number)

    def clear(self) -> None:
        """A publisher is gone."""
        self._numbers.clear()
        self._names.clear()
