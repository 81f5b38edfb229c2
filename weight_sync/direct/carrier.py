"""Carrier of direct transfers: packs from the sources to the sinks of one membership.

The members tell one another their regions once; plan and group then serve every transfer of the membership.
A pack goes from its source along a chain of its sinks, each of which sends it on and verifies it. With a base
it goes, after a head, as the difference to the base's where that is shorter; the whole pack is verified.
A transfer
  consumes: an order, packs of the member before   waits for: a source's version; arrivals and departures of
                                                   packs, until the order's deadline
  unblocked by: the other members, an abort, the deadline   produces: packs for the member after, counts
All members go through their packs in one global order. Invariant: no member waits for an operation while
one of a lower pack is unstarted. So nothing can wait in a circle: of the lowest pack that is not
everywhere, the first hop not done has a sender that has the pack and no lower one to wait for, and a
receiver whose window is open at it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from asyncrl.core.errors import SyncError
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Runtime
from weight_sync.backends.contract import DigestMismatch, Group
from weight_sync.backends.gloo import FAILURES, explain
from weight_sync.backends.sealed import SealedStore
from weight_sync.backends.tags import TAG_BYTES, Tags
from weight_sync.direct.group import GlooGroup, Sent
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.party import UNDER_WAY, PackStore, Party, Superseded
from weight_sync.encoding.delta_codec import HEAD, Head, shorten
from weight_sync.memory.manifest import ITEM_BYTES
from weight_sync.rectangles.packs import Pack, make_packs
from weight_sync.rectangles.parcels import NobodyHolds, Region, plan_parcels
from weight_sync.rectangles.rectangle import Rectangle

DIGEST_BYTES = 16
NO_BYTES = torch.empty(0, dtype=torch.uint8)
Move = Callable[[torch.Tensor, int, int, float], Sent]
"""Starts to send or to receive bytes: to or from that rank, with a tag, until then."""
PACK_BYTES = 8 << 20
"""Of a pack: while one travels the next is packed, and the one before is checked."""
PLACE_BITS = 32
"""Of a pack's number; above them are those of its round, which tell rounds of one membership apart."""


class _Told(msgspec.Struct, frozen=True):
    """Regions of one member as they travel: name, start, stop; and dtypes."""

    regions: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    dtypes: dict[str, str]

    def read(self) -> list[Region]:
        return [(name, Rectangle(start, stop)) for name, start, stop in self.regions]


@dataclass(frozen=True)
class Step:
    """A pack at one member.

    Attributes:
        index: In the order of all packs.
        source: Rank that it comes from; None at its source.
        target: Rank that it goes to; None at the end of the chain.
    """

    index: int
    pack: Pack
    source: int | None
    target: int | None


def make_steps(packs: Iterable[Pack], num_sources: int, rank: int) -> list[Step]:
    """Return the steps of a member: sources take turns, and so do the sinks at the head of a chain."""
    num_before: Counter[int] = Counter()
    turns: list[tuple[int, int, Pack]] = []
    for pack in packs:
        turns.append((num_before[pack.source], pack.source, pack))
        num_before[pack.source] += 1
    steps = []
    for index, (_, _, pack) in enumerate(sorted(turns, key=lambda turn: turn[:2])):
        first = index % len(pack.sinks)
        chain = [pack.source, *(num_sources + sink for sink in pack.sinks[first:] + pack.sinks[:first])]
        if rank in chain:
            at = chain.index(rank)
            source, target = chain[at - 1] if at else None, chain[at + 1] if at + 1 < len(chain) else None
            steps.append(Step(index, pack, source, target))
    return steps


class Carrier:
    """One membership as a member carries it out, a transfer at a time; any thread may abort it.

    After any error but DigestMismatch it is only good for `close`.

    Attributes:
        num_steps: Packs that the transfer is done with here; its owner sets it to 0 before the next one.
        num_bytes: Of packs, as they travelled.
    """

    def __init__(self, runtime: Runtime, party: Party, secret: str, max_bytes: int = PACK_BYTES) -> None:
        self._clock, self._party, self._max_bytes = runtime, party, max_bytes
        self._group = GlooGroup(runtime, secret)
        self._steps: list[Step] | None = None
        self.num_steps = self.num_bytes = 0

    def run(self, order: SeatOrder, until: float) -> int:
        """Carry out a transfer; return the bytes of this member's packs, as they travelled.

        Raises:
            DigestMismatch: A pack came damaged; all others have been sent on, and arrived.
            Superseded: See `Party.open`. The others wait until an `abort`, so that this is told first.
            DeadlineExceeded, SyncError: The transfer failed, for the members connected to this one too.
        """
        self.num_bytes = 0
        try:
            if self._steps is None:
                self._steps = self._meet(order, until)
            steps = self._steps
            packs = [step.pack for step in steps]
            store, num_wrong = self._party.open(order.number, packs, until, order.base), -1
            carry = self._send if order.rank < order.num_sources else self._receive
            try:
                num_wrong = carry(order, steps, store, until)
            finally:
                store.close(is_whole=num_wrong == 0)
        except Superseded:
            raise
        except BaseException:
            self.abort()
            self.close()
            raise
        if num_wrong:
            raise DigestMismatch(f"{num_wrong} of {len(packs)} packs came damaged")
        return self.num_bytes

    def abort(self) -> None:
        """Give up the transfer that goes on, here and at the members connected to this one."""
        self._group.abort()

    def close(self) -> None:
        """Free the group."""
        self._group.close()

    def _meet(self, order: SeatOrder, until: float) -> list[Step]:
        """Form the group, exchange regions, and return this member's steps of every transfer."""
        group = Group(order.membership, order.rank, order.world, order.store_host, order.store_port)
        store = self._group.form(group, until)
        try:
            told = _exchange(self._group, store, _tell(self._party), until)
        except FAILURES as error:
            raise explain(error, self._clock.now(), until, "the members told no regions") from error
        packs = _plan(told, order.num_sources, self._max_bytes)
        return make_steps(packs, order.num_sources, order.rank)

    def _send(self, order: SeatOrder, steps: Sequence[Step], store: PackStore, until: float) -> int:
        """Send every pack; none of them is damaged here."""
        seals, num_head = _Seals(order), HEAD.size if order.base else 0
        with _UnderWay(self._group, until) as leaving:
            for place, step in enumerate(steps):
                if len(leaving) == UNDER_WAY:
                    self._end_first(leaving)
                data_B = store.pack(place)
                trailer_B = seals.make(step.index, data_B)
                fault_point("direct.source.pack", order.number, step.index)
                if order.base:
                    head_B, data_B = shorten(store.base(place), data_B, step.pack.width)
                    trailer_B = torch.cat([head_B, trailer_B])
                leaving.send(step, data_B, trailer_B)
                self.num_bytes += len(data_B) + num_head
            while len(leaving):
                self._end_first(leaving)
        return 0

    def _end_first(self, leaving: _UnderWay) -> None:
        leaving.end_first()
        self.num_steps += 1

    def _receive(self, order: SeatOrder, steps: Sequence[Step], store: PackStore, until: float) -> int:
        """Receive every pack, and send it on; return how many came damaged."""
        seals, num_wrong, ahead = _Seals(order), 0, enumerate(steps)
        window, num_head = (1, HEAD.size) if order.base else (UNDER_WAY, 0)
        with _UnderWay(self._group, until) as coming, _UnderWay(self._group, until) as leaving:
            for place in range(len(steps)):
                for index, step in itertools.islice(ahead, window - len(coming)):
                    coming.receive(step, NO_BYTES if num_head else store.pack(index), seals.empty(num_head))
                step, body_B, trailer_B = coming.end_first()
                head = Head.read(trailer_B, step.pack.num_bytes, f"pack {step.index}") if num_head else None
                if head is not None:
                    body_B = store.pack(place) if head.is_whole else NO_BYTES.new_empty(head.num_bytes)
                    coming.receive(step, body_B, NO_BYTES)
                    coming.end_first()
                fault_point("direct.sink.pack", order.number, step.index)
                if step.target is not None:
                    if len(leaving) == UNDER_WAY:
                        leaving.end_first()
                    leaving.send(step, body_B, trailer_B)
                data_B = body_B if head is None or head.is_whole else _patch(store, place, head, body_B)
                num_wrong += not seals.fits(step.index, data_B, trailer_B[num_head:])
                self.num_steps += 1
                self.num_bytes += len(body_B) + num_head
            while len(leaving):
                leaving.end_first()
        return num_wrong


def _patch(store: PackStore, place: int, head: Head, body_B: torch.Tensor) -> torch.Tensor:
    """Return a pack's place with what it has after the difference; without its base the seal will not fit."""
    data_B = store.base(place)
    if data_B is None:
        return store.pack(place)
    head.apply(body_B, data_B)
    return data_B


class _UnderWay:
    """Packs and their trailers that travel, in order. At the end none of their bytes is referred to.

    Without bytes there is no message.
    """

    def __init__(self, group: GlooGroup, until: float) -> None:
        self._group, self._until = group, until
        self._started: deque[tuple[Step, torch.Tensor, torch.Tensor, list[Sent]]] = deque()

    def __enter__(self) -> _UnderWay:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._group.abort()  # before the stage is freed, into which packs are still being received
        self._started.clear()

    def __len__(self) -> int:
        return len(self._started)

    def send(self, step: Step, data_B: torch.Tensor, trailer_B: torch.Tensor) -> None:
        assert step.target is not None, "the end of a chain"
        self._start(self._group.send, step.target, step, data_B, trailer_B)

    def receive(self, step: Step, data_B: torch.Tensor, trailer_B: torch.Tensor) -> None:
        assert step.source is not None, "the start of a chain"
        self._start(self._group.receive, step.source, step, data_B, trailer_B)

    def _start(
        self, move: Move, other: int, step: Step, data_B: torch.Tensor, trailer_B: torch.Tensor
    ) -> None:
        parts = enumerate((trailer_B, data_B), 2 * step.index)
        moves = [move(part_B, other, tag, self._until) for tag, part_B in parts if len(part_B)]
        self._started.append((step, data_B, trailer_B, moves))

    def end_first(self) -> tuple[Step, torch.Tensor, torch.Tensor]:
        """Wait for the pack that was started first; return it, its bytes and its trailer."""
        step, data_B, trailer_B, moves = self._started[0]
        for move in moves:
            move.wait()
        self._started.popleft()
        return step, data_B, trailer_B


class _Seals:
    """Trailers of packs: digests, or tags where others may change bytes; of one round and place alone."""

    def __init__(self, order: SeatOrder) -> None:
        self._first_place = order.round % (1 << PLACE_BITS) << PLACE_BITS
        self._tags = Tags(order.secret, order.membership) if order.is_tagged else None

    def empty(self, num_head: int) -> torch.Tensor:
        return torch.empty(num_head + (TAG_BYTES if self._tags else DIGEST_BYTES), dtype=torch.uint8)

    def make(self, index: int, data_B: torch.Tensor) -> torch.Tensor:
        place = self._first_place | index
        if self._tags is not None:
            return self._tags.make(place, data_B)
        digest = xxhash.xxh3_128(data_B.numpy().data, seed=place).digest()
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8)

    def fits(self, index: int, data_B: torch.Tensor, trailer_B: torch.Tensor) -> bool:
        if self._tags is None:
            return torch.equal(self.make(index, data_B), trailer_B)
        try:
            self._tags.check(self._first_place | index, data_B, trailer_B)
        except SyncError:
            return False
        return True


def _tell(party: Party) -> bytes:
    regions = [(tensor, rectangle.start, rectangle.stop) for tensor, rectangle in party.regions]
    return msgspec.msgpack.encode(_Told(regions, dict(party.dtypes)))


def _exchange(group: GlooGroup, store: SealedStore, mine: bytes, until: float) -> list[_Told]:
    """Return what each member has told; equal words are fetched once. The last to read removes them."""
    digest = xxhash.xxh3_128(mine)
    store.set(digest.hexdigest(), mine)
    digests_B = group.gather(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8), until)
    keys = [digest_B.numpy().tobytes().hex() for digest_B in digests_B]
    told = {key: msgspec.msgpack.decode(store.get(key), type=_Told) for key in dict.fromkeys(keys)}
    if store.add("read", 1) == len(keys):
        for key in told:
            store.delete(key)
    return [told[key] for key in keys]


def _plan(told: Sequence[_Told], num_sources: int, max_bytes: int) -> list[Pack]:
    dtypes = {tensor: dtype for one in told[:num_sources] for tensor, dtype in one.dtypes.items()}
    regions = {id(one): one.read() for one in told}
    parties = [regions[id(one)] for one in told]
    held, wanted = parties[:num_sources], parties[num_sources:]
    unknown = {tensor for some in wanted for tensor, _ in some if dtypes.get(tensor) not in ITEM_BYTES}
    if unknown:
        raise NobodyHolds(f"{len(unknown)} tensors are held by no learner rank: {sorted(unknown)[:3]}")
    item_bytes = {tensor: ITEM_BYTES[dtype] for tensor, dtype in dtypes.items() if dtype in ITEM_BYTES}
    return make_packs(plan_parcels(held, wanted, item_bytes, max_bytes=max_bytes), max_bytes)
