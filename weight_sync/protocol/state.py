"""Coordination state shared by all parts of the protocol: members, publisher, orders, blame (pure).

Owns the numbers of rounds and memberships, and the blame of members. Decides nothing by itself.
Invariant: an id is given once, and the ids of a coordinator with a newer token are larger.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from asyncrl.core.staleness import UNLOADED, PolicyVersion
from weight_sync.protocol.lanes.stripes import PUBLISHER, Stripe
from weight_sync.protocol.members import Member, PublisherInfo
from weight_sync.protocol.messages import Instruction
from weight_sync.protocol.rounds import (
    FOLDER_BYTES_PER_S,
    TRANSFER_BYTES_PER_S,
    Lane,
    Order,
    Round,
    Timing,
)
from weight_sync.sync_records import BlameRecord, Record

ID_BITS = 20
"""Of an id that count up; the bits above them are the coordinator's token."""
MAX_BACKOFF_S = 5.0


@dataclass
class CoordinationState:
    """See the module.

    Attributes:
        publishers: By name; there is one of each stripe once all have said hello.
        current: The version that all publishers can send, and its size in bytes.
        newest_number: Of all versions that any publisher had; an older one is never offered.
        uses_delta: Let differences be sent to members that hold the same base.
        uses_direct: Let learner ranks send to engine workers where both can.
        max_unavailable: Share of the members that may load at once, None for all that `parallelism` allows.
        lagging: All members that could be offered the current version are among them; `fenced`: all that
            are fenced.
        permits: The members that were told to load a version.
    """

    timing: Timing
    parallelism: int
    token: int
    uses_delta: bool = False
    max_unavailable: float | None = None
    uses_direct: bool = False
    members: dict[str, Member] = field(default_factory=dict)
    publishers: dict[str, PublisherInfo] = field(default_factory=dict)
    current: PolicyVersion | None = None
    num_bytes: int = 0
    newest_number: int = UNLOADED
    culprit: str = ""
    counters: Counter[str] = field(default_factory=Counter)
    lagging: set[str] = field(default_factory=set)
    fenced: set[str] = field(default_factory=set)
    permits: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._retries: list[tuple[float, str]] = []
        self._orders: list[Order] = []
        self._records: list[Record] = []
        self._last_id = self.token << ID_BITS

    @property
    def publisher(self) -> PublisherInfo | None:
        """The publisher of the first stripe, which speaks for the learner's ranks too."""
        return self.publishers.get(PUBLISHER)

    @property
    def senders(self) -> list[PublisherInfo]:
        """The publishers in the order of their stripes; empty unless each has one, and all agree on them."""
        known = sorted(self.publishers.values(), key=lambda one: one.stripe.index)
        return known if {one.stripe.count for one in known} == {len(known)} else []

    def deadlines(self, lane: Lane) -> Timing:
        """Return those of the current version in a lane."""
        rate = FOLDER_BYTES_PER_S if lane is Lane.FOLDER else TRANSFER_BYTES_PER_S
        return self.timing.for_bytes(self.num_bytes, rate)

    @property
    def sent_numbers(self) -> set[int]:
        """Numbers of versions that some member has or is getting."""
        return {n for m in self.members.values() for n in (m.serving, m.staging, m.staged, m.swapping) if n}

    def common_base(self, names: Sequence[str], number: int, *, is_direct: bool) -> int:
        """Return the version that all of `names` hold and differences may be to; 0 if all is to be sent."""
        members = [self.members[name] for name in names]
        bases = {member.direct_base if is_direct else member.base for member in members}
        base = bases.pop() if len(bases) == 1 and self.uses_delta else UNLOADED
        return base if base < number else UNLOADED

    def goes_directly(self, member: Member) -> bool:
        """Tell whether the current version can go from the learner's ranks to the member's engine."""
        assert self.current is not None and self.publisher is not None, "there is a version to send"
        is_able = self.uses_direct and bool(self.publisher.seats and member.seats)
        is_apart = member.by_folder or member.is_lone or member.staged_until >= self.current.number
        return is_able and not is_apart

    def order(self, to: str, what: Instruction) -> None:
        """Queue an instruction to a peer."""
        self._orders.append(Order(to, what))

    def forget_orders(self, to: str) -> None:
        """Drop the orders to a peer from before its hello: a new process does not know them."""
        self._orders = [order for order in self._orders if order.to != to]

    def take_orders(self) -> list[Order]:
        """Return the orders since the last call, oldest first."""
        orders, self._orders = self._orders, []
        return orders

    def note(self, record: Record) -> None:
        """Keep a record until it is taken."""
        self._records.append(record)

    def take_records(self) -> list[Record]:
        """Return the records since the last call, oldest first."""
        records, self._records = self._records, []
        return records

    def next_id(self) -> int:
        """Return a number that was never returned before."""
        self._last_id += 1
        return self._last_id

    def is_silent(self, last_seen: float, now: float) -> bool:
        """Tell whether a peer last heard at `last_seen` is silent for too long."""
        return now - last_seen >= self.timing.silence_s

    def shift(self, seconds: float, now: float) -> None:
        """Put deadlines off by a time in which the coordinator did not run; nobody was silent then."""
        self.counters["pauses"] += 1
        for publisher in self.publishers.values():
            publisher.last_seen = now
        for member in self.members.values():
            member.last_seen = now
            member.swap_until += seconds

    def forget_progress(self, member: Member) -> None:
        """Forget the member's staged version, its transfer and its swap."""
        member.forget_progress()
        self.permits.discard(member.name)

    def blame(self, member: Member, cause: str, round_: Round | None = None) -> None:
        """Name the member as the culprit and fence it until it has caught up."""
        member.last_error = cause
        self._name(member.name, cause, round_)
        if member.is_listening:
            self.fence(member)

    def blame_publisher(self, stripe: Stripe, cause: str, round_: Round | None = None) -> None:
        """Name the publisher of a stripe as the culprit."""
        self._name(stripe.publisher, cause, round_)

    def fence(self, member: Member) -> None:
        """Take the member's leases away until it has caught up with the newest version."""
        member.fence(max(self.newest_number, UNLOADED + 1))
        self.fenced.add(member.name)

    def back_off(self, member: Member, now: float) -> None:
        """Offer the member nothing for a while."""
        member.num_failures += 1
        wait_s = self.timing.backoff_s * 2 ** min(member.num_failures - 1, 16)
        member.retry_at = now + min(MAX_BACKOFF_S, wait_s)
        heapq.heappush(self._retries, (member.retry_at, member.name))

    def next_retry_at(self, now: float) -> float:
        """Return when the first member may be offered something again that may not now."""
        retries = self._retries
        while retries and (retries[0][0] <= now or self.members[retries[0][1]].retry_at != retries[0][0]):
            heapq.heappop(retries)
        return retries[0][0] if retries else math.inf

    def in_order(self, names: Iterable[str]) -> list[Member]:
        """Return members in the order of their first hellos."""
        return sorted((self.members[name] for name in names), key=lambda member: member.rank)

    def _name(self, name: str, cause: str, round_: Round | None) -> None:
        self.culprit = f"{name}: {cause}"
        self.counters["culprits"] += 1
        if round_ is not None:
            round_.culprits.append(self.culprit)
        self.note(BlameRecord(name, cause, self.newest_number))
