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
receiver whose window is open at it. Over NCCL, which has no tags, packs travel in waves instead: see `waves`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch
import xxhash

from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.staleness import UNLOADED
from weight_sync.backends.contract import DigestMismatch, Group
from weight_sync.backends.gloo import FAILURES, explain
from weight_sync.backends.rendezvous import connect_store
from weight_sync.backends.sealed import SealedStore
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.party import UNDER_WAY, PackStore, Party, Superseded
from weight_sync.direct.transports.choice import describe_place, find_refusal
from weight_sync.direct.transports.gloo import GlooGroup, Sent
from weight_sync.direct.transports.nccl import NcclGroup
from weight_sync.direct.transports.seals import Seals
from weight_sync.direct.waves import Step, carry_waves, make_steps
from weight_sync.encoding.delta_codec import HEAD, Head, shorten
from weight_sync.memory.manifest import ITEM_BYTES
from weight_sync.rectangles.packs import Pack, make_packs
from weight_sync.rectangles.parcels import NobodyHolds, Region, plan_parcels
from weight_sync.rectangles.rectangle import Rectangle

log = logging.getLogger(__name__)

NO_BYTES = torch.empty(0, dtype=torch.uint8)
Move = Callable[[torch.Tensor, int, int, float], Sent]
"""Starts to send or to receive bytes: to or from that rank, with a tag, until then."""
PACK_BYTES = 8 << 20
"""Of a pack: while one travels the next is packed, and the one before is checked."""


class _Told(msgspec.Struct, frozen=True):
    """Regions of one member as they travel: name, start, stop; and dtypes."""

    regions: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    dtypes: dict[str, str]

    def read(self) -> list[Region]:
        return [(name, Rectangle(start, stop)) for name, start, stop in self.regions]


class Carrier:
    """One membership as a member carries it out, a transfer at a time; any thread may abort it.

    After any error but DigestMismatch it is only good for `close`.

    Attributes:
        num_steps: Packs that the transfer is done with here; its owner sets it to 0 before the next one.
        num_bytes: Of packs, as they travelled.
    """

    def __init__(self, runtime: Runtime, party: Party, secret: str, max_bytes: int = PACK_BYTES) -> None:
        self._clock, self._party, self._max_bytes = runtime, party, max_bytes
        self._runtime, self._secret = runtime, secret
        self._gloo = GlooGroup(runtime)
        self._group: GlooGroup | NcclGroup = self._gloo
        self._steps: list[Step] | None = None
        self._is_aborted = False
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
            base = UNLOADED if isinstance(self._group, NcclGroup) else order.base
            store, num_wrong = self._party.open(order.number, packs, until, base, self._group.device), -1
            try:
                num_wrong = self._carry(order, steps, store, until)
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
        self._is_aborted = True
        self._group.abort()

    def close(self) -> None:
        """Free the group."""
        self._group.close()

    def _meet(self, order: SeatOrder, until: float) -> list[Step]:
        """Exchange regions, form the group, and return this member's steps of every transfer."""
        group = Group(order.membership, order.rank, order.world, order.store_host, order.store_port)
        left = timedelta(seconds=max(0.001, until - self._clock.now()))
        device = self._party.device
        try:
            store = connect_store(None, group.store_host, group.store_port, left)
            sealed = SealedStore(store, self._secret, f"direct/{group.membership}")
            told, places = _exchange(sealed, group, _tell(self._party), describe_place(device))
        except FAILURES as error:
            raise explain(error, self._clock.now(), until, "not all members told their regions") from error
        refusal = find_refusal(places)
        if order.rank == 0:
            how = f"gloo, as {refusal}" if refusal else "NCCL"
            log.info("%d members of membership %d meet over %s", group.world, group.membership, how)
        if not refusal:
            self._group = NcclGroup(self._runtime, device)
            if self._is_aborted:  # it may have been while there was another group
                self._group.abort()
        self._group.form(sealed, group, until)
        packs = _plan(told, order.num_sources, self._max_bytes)
        return make_steps(packs, order.num_sources, order.rank)

    def _carry(self, order: SeatOrder, steps: Sequence[Step], store: PackStore, until: float) -> int:
        """Carry every pack; return how many came damaged."""
        if isinstance(self._group, NcclGroup):  # which has no tags: sizes are known before, packs go whole
            seals = Seals(order, self._group.device)
            self.num_bytes = sum(step.pack.num_bytes for step in steps)
            return carry_waves(self._group, order, steps, store, seals, until, self)
        return (self._send if order.rank < order.num_sources else self._receive)(order, steps, store, until)

    def _send(self, order: SeatOrder, steps: Sequence[Step], store: PackStore, until: float) -> int:
        """Send every pack; none of them is damaged here."""
        seals, num_head = Seals(order), HEAD.size if order.base else 0
        with _UnderWay(self._gloo, until) as leaving:
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
        seals, num_wrong, ahead = Seals(order), 0, enumerate(steps)
        window, num_head = (1, HEAD.size) if order.base else (UNDER_WAY, 0)
        with _UnderWay(self._gloo, until) as coming, _UnderWay(self._gloo, until) as leaving:
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


def _tell(party: Party) -> bytes:
    regions = [(tensor, rectangle.start, rectangle.stop) for tensor, rectangle in party.regions]
    return msgspec.msgpack.encode(_Told(regions, dict(party.dtypes)))


def _exchange(store: SealedStore, group: Group, mine: bytes, place: str) -> tuple[list[_Told], list[str]]:
    """Return what each member has told, and its place; equal words are fetched once.

    The last to read removes them.
    """
    digest = xxhash.xxh3_128_hexdigest(mine)
    store.set(digest, mine)
    store.set(f"member/{group.rank}", msgspec.json.encode((digest, place)))
    if group.rank == 0:
        names = [f"member/{rank}" for rank in range(group.world)]
        store.set("members", b"[" + b",".join(store.get(name) for name in names) + b"]")
        for name in names:
            store.delete(name)
    members = msgspec.json.decode(store.get("members"), type=list[tuple[str, str]])
    told = {key: msgspec.msgpack.decode(store.get(key), type=_Told) for key in dict.fromkeys(dict(members))}
    if store.add("read", 1) == len(members):
        for key in (*told, "members"):
            store.delete(key)
    return [told[key] for key, _ in members], [where for _, where in members]


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
