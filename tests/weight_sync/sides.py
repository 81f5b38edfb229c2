"""Both sides of the protocol in one process, as models around the parts that decide.

The coordinator's side is `Coordination`, the peers' side `RoundTracker`, `CoordinatorEpoch` and the real
`StagingArea` with its segments in shared memory. Bytes move when they are told to,
also into copies that were given up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import xxhash

from asyncrl.core.staleness import UNLOADED, PolicyVersion
from weight_sync.coordination.order_queue import OrderQueue
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan
from weight_sync.memory.staging_area import Copy, StagingArea
from weight_sync.protocol.lanes.stripes import WHOLE, Stripe
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.messages import ReceiverHello
from weight_sync.protocol.peer import CoordinatorEpoch, EpochCheck, RoundTracker, Stage
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import NEVER, Order
from weight_sync.receiving.assembly import Assemblies

BUCKET_BYTES, NUM_BUCKETS = 64, 2
Report = Callable[[Coordination, float], None]


def manifest_of(number: int) -> Manifest:
    """Every byte of version `number` is `number`."""
    layout = plan([TensorSpec("w", "uint8", (BUCKET_BYTES * NUM_BUCKETS,))], BUCKET_BYTES)
    digest = xxhash.xxh3_128(bytes([number % 256]) * BUCKET_BYTES).hexdigest()
    return Manifest(PolicyVersion(number, number), layout, (Bucket(BUCKET_BYTES, digest),) * NUM_BUCKETS)


class Boss:
    """One coordinator. `is_deposed`: it heard of a newer one and gives no more orders."""

    def __init__(self, coordination: Coordination) -> None:
        self.coordination = coordination
        self.is_deposed = False
        self._order_queues: dict[str, OrderQueue] = {}

    def hears(self, token: int) -> bool:
        """A peer that obeys the coordinator with `token` speaks to it."""
        self.is_deposed = self.is_deposed or token > self.coordination.token
        return not self.is_deposed

    def open_box(self, peer: Peer) -> None:
        """The peer has said hello."""
        before = self._order_queues.get(peer.name)
        self._order_queues[peer.name] = OrderQueue.opened(peer.incarnation, self.coordination.token, before)

    def put(self, order: Order) -> None:
        if order.to in self._order_queues:
            self._order_queues[order.to].put(order)

    def answer_poll(self, peer: Peer, after: int) -> list[tuple[int, Order]]:
        """Return the orders that the peer has not acknowledged, after it has all up to `after`."""
        box = self._order_queues.get(peer.name)
        if box is None or box.incarnation != peer.incarnation:
            return []
        box.acknowledge(after)
        return list(box.orders)


@dataclass(eq=False)
class Peer:
    """What the publisher and the receivers have in common: a way to a coordinator, and rounds.

    Attributes:
        after: Number of the last order that it got since its last hello; `after_before`, until then.
    """

    name: str
    incarnation: str
    started_ms: int
    boss: Boss | None = None
    is_stopped: bool = False
    orders: deque[tuple[int, Order]] = field(default_factory=deque)
    old_orders: list[tuple[int, Order]] = field(default_factory=list)
    reports: deque[Report] = field(default_factory=deque)
    rounds: RoundTracker = field(default_factory=RoundTracker)
    epoch: CoordinatorEpoch = field(default_factory=CoordinatorEpoch)
    after: int = 0
    after_before: int = 0
    now: float = 0.0
    seats: int = 0

    def change_seats(self, count: int) -> None:
        """Other processes of the peer can take part in direct rounds from now on, or none."""
        self.seats = count
        self.report(lambda c, now: c.seats_changed(self.name, count, now))

    def fetch_orders(self) -> None:
        """Poll; before that a poll from before the last hello arrives, late and over another connection."""
        if self.boss is None or self.boss.is_deposed:
            return
        self.boss.answer_poll(self, self.after_before)  # its answer is of another session, and not heard
        for seq, order in self.boss.answer_poll(self, self.after):
            self.orders.append((self.boss.coordination.token, order))
            self.after = seq

    def report(self, call: Report) -> None:
        self.reports.append(call)

    def take_order(self, keep: bool = False) -> None:
        token, order = self.orders.popleft()
        if keep:
            self.old_orders.append((token, order))
        self.hear_order(token, order)

    def hear_order(self, token: int, order: Order) -> None:
        if self.epoch.hear(token) is not EpochCheck.OLDER:
            self.obey(order)

    def send_report(self, now: float) -> None:
        """Report to the coordinator; one that does not know this peer gets a hello instead."""
        call = self.reports.popleft()
        if self.boss is None or not self.boss.hears(self.epoch.token):
            return
        if self.boss.coordination.seen(self.name, self.incarnation, now):
            call(self.boss.coordination, now)
        else:
            self.say_hello(self.boss, now)

    def poll(self, now: float) -> None:
        self.now = now
        if self.boss is None or not self.boss.hears(self.epoch.token):
            self.boss = None
        elif not self.boss.coordination.seen(self.name, self.incarnation, now):
            self.say_hello(self.boss, now)

    def say_hello(self, boss: Boss, now: float) -> bool:
        """Give up all rounds and introduce itself, as `session.py` does."""
        for round_id in self.rounds.open_rounds:
            self.abort(round_id)
        self.boss = None
        if not boss.hears(self.epoch.token):
            return False
        self.orders.clear()
        if self.introduce(boss.coordination, now):
            self.boss = boss
            boss.open_box(self)
        self.after, self.after_before = 0, max(self.after, self.after_before)
        self.epoch.hear(boss.coordination.token)
        return self.boss is not None

    def introduce(self, coordination: Coordination, now: float) -> bool:
        raise NotImplementedError

    def obey(self, order: Order) -> None:
        raise NotImplementedError

    def abort(self, round_id: int) -> None:
        raise NotImplementedError


@dataclass(eq=False)
class Thread:
    """A transfer thread of a receiver: it writes until it ends, whatever its receiver wants by then."""

    round: int
    number: int
    copy: Copy
    stripe: Stripe = WHOLE
    lacks_base: bool = False
    num_buckets: int = 0

    @property
    def own(self) -> range:
        return self.stripe.buckets(NUM_BUCKETS)

    @property
    def is_done(self) -> bool:
        return self.num_buckets == len(self.own)

    def move(self, is_corrupt: bool = False) -> None:
        start = self.own[self.num_buckets] * BUCKET_BYTES
        self.copy.bytes_B[start : start + BUCKET_BYTES] = self.number % 256 ^ (is_corrupt or self.lacks_base)
        self.num_buckets += 1

    def has_right_digests(self) -> bool:
        parts = self.copy.bytes_B.reshape(NUM_BUCKETS, BUCKET_BYTES)
        wanted = self.copy.manifest.digests
        return all(xxhash.xxh3_128(parts[i].numpy().data).hexdigest() == wanted[i] for i in self.own)


class ModelReceiver(Peer):
    """Does what `ReceiverService` does, without sockets and threads."""

    def __init__(self, name: str, incarnation: str, started_ms: int, prefix: str) -> None:
        super().__init__(name, incarnation, started_ms)
        self.staging = StagingArea(f"{prefix}{incarnation}-", incarnation, keeps_base=True)
        self.assemblies = Assemblies(self.staging)
        self.incoming: dict[int, tuple[Copy, Stripe]] = {}
        self.num_kept = 0  # stripes that an offer found here
        self.threads: dict[int, Thread] = {}
        self.serving = UNLOADED
        self.is_attended = self.is_pinned = self.is_draining = False
        self.loading: Copy | None = None

    def introduce(self, coordination: Coordination, now: float) -> bool:
        info = ReceiverHello(
            name=self.name,
            incarnation=self.incarnation,
            serving=self.serving,
            staged=self.staging.newest_verified,
            attended=self.is_attended,
            pinned=self.is_pinned,
            draining=self.is_draining,
            started_ms=self.started_ms,
            base=self.staging.base_number,
            direct_base=self.staging.direct_base,
            seats=self.seats,
        )
        return coordination.hello(info, now)

    def obey(self, order: Order) -> None:
        fields = order.fields
        if order.kind == "offer":
            stripe = Stripe(fields["stripe"], fields["num_stripes"])
            self._accept(fields["round"], fields["number"], stripe, is_direct=fields["direct"])
        elif order.kind == "transfer" and self.rounds.begin(fields["round"]):
            lacks_base = fields["base"] not in (UNLOADED, self.base_of(order))
            thread = Thread(fields["round"], fields["number"], *self.incoming[fields["round"]], lacks_base)
            self.threads[fields["round"]] = thread
        elif order.kind == "abort":
            self.abort(fields["round"])
        elif order.kind == "commit":
            self.staging.commit(fields["number"])
        elif order.kind == "withdraw":
            self.staging.withdraw()
            self.is_attended = False

    def base_of(self, transfer: Order) -> int:
        """Return the version that a transfer may send differences to."""
        return self.staging.direct_base if transfer.fields["sources"] else self.staging.base_number

    def _accept(self, round_id: int, number: int, stripe: Stripe, *, is_direct: bool) -> None:
        if self.rounds.offer(round_id):
            manifest = manifest_of(number)
            bytes_B = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
            if is_direct:
                found = self.assemblies.add(round_id, Copy(manifest, "", bytes_B))
            else:
                found = self.assemblies.join(round_id, manifest, stripe.count)
            if stripe.index in found.stripes:
                self.num_kept += 1
                self.rounds.begin(round_id)
                self.rounds.end(round_id)
                self._report_verified(round_id, number, stripe)
                return
            self.incoming[round_id] = found.copy, stripe
            while not self.staging.reserve(found.copy):
                pass
        if round_id in self.incoming:
            self.report(lambda c, now: c.accepted(self.name, round_id, now))

    def abort(self, round_id: int) -> None:
        stage = self.rounds.abort(round_id)
        if stage is None:
            return
        del self.incoming[round_id]
        if stage is Stage.OFFERED:
            self.assemblies.leave(round_id)
        else:
            self.assemblies.abandon(round_id)
        self.report(lambda c, now: c.failed(self.name, round_id, "aborted", now))

    def end(self, thread: Thread, cause: str = "") -> None:
        """The transfer thread ends, by itself or because the group broke."""
        del self.threads[thread.round]
        if not self.rounds.end(thread.round):
            self.assemblies.end_abandoned(thread.round)
            return
        del self.incoming[thread.round]
        cause = cause or ("" if thread.has_right_digests() else "digest")
        if cause:
            self.assemblies.leave(thread.round)
            self.report(lambda c, now: c.failed(self.name, thread.round, cause, now, thread.num_buckets))
        else:
            self._report_verified(thread.round, thread.number, thread.stripe)

    def _report_verified(self, round_id: int, number: int, stripe: Stripe) -> None:
        copy = self.assemblies.verify(round_id, stripe.index)
        if copy is not None:
            self.staging.put_verified(copy)
        is_complete = copy is not None
        self.report(lambda c, now: c.verified(self.name, round_id, number, now, "", is_complete))

    # --- the replica ------------------------------------------------------------------------------

    def ask(self) -> None:
        """The replica asks for weights and takes what is committed."""
        if not self.is_attended:
            self.is_attended = True
            self.report(lambda c, now: c.attended(self.name, now))
        if self.loading is None and not self.is_pinned:
            self.loading = self.staging.take(self.serving)

    def load(self, is_ok: bool) -> None:
        """The engine reads the copy that was taken: all of one version, and newer than what it has."""
        assert self.loading is not None
        number, found = self.loading.number, set(self.loading.bytes_B.tolist())
        assert found == {number % 256}, f"{self.name} loads {found} as version {number}"
        assert number > self.serving, f"{self.name} goes from {self.serving} to {number}"
        self.loading = None
        self.staging.finish_load(number, is_ok)
        self.serving = number if is_ok else UNLOADED
        self.report(lambda c, now: c.loaded(self.name, number, is_ok, "" if is_ok else "broken", now))
        if not is_ok:
            self.lose_direct_copies()

    def change_seats(self, count: int) -> None:
        self.lose_direct_copies()
        super().change_seats(count)

    def lose_direct_copies(self) -> None:
        for number in self.staging.drop_direct():
            self.loading = None if self.loading and self.loading.number == number else self.loading
            self.report(lambda c, now, number=number: c.lost(self.name, number, now))

    def restart_replica(self) -> None:
        self.loading, self.serving = None, UNLOADED
        self.staging.release_copies()
        self.report(lambda c, now: c.restarted(self.name, UNLOADED, now))
        self.lose_direct_copies()

    def tell(self, what: str) -> None:
        self.is_pinned = {"pin": True, "unpin": False}.get(what, self.is_pinned)
        self.is_draining = self.is_draining or what == "drain"
        self.report(lambda c, now: getattr(c, what)(self.name, now))


class ModelPublisher(Peer):
    """Does what `publisher.py` does; `number` is the version in its shared memory."""

    def __init__(
        self, incarnation: str, started_ms: int, stripe: Stripe = WHOLE, number: int = UNLOADED
    ) -> None:
        super().__init__(stripe.publisher, incarnation, started_ms)
        self.stripe, self.number = stripe, number
        self.sending: dict[int, int] = {}
        self.began: dict[int, float] = {}

    def introduce(self, coordination: Coordination, now: float) -> bool:
        place = (self.incarnation, "127.0.0.1", 1, now)
        publisher = PublisherInfo(*place, started_ms=self.started_ms, seats=self.seats, stripe=self.stripe)
        current = PolicyVersion(self.number, self.number) if self.number else None
        return coordination.publisher_hello(publisher, current, now)

    def publish(self, number: int) -> None:
        self.number = number
        self.report(lambda c, now: c.published(PolicyVersion(number, number), now, name=self.name))

    def obey(self, order: Order) -> None:
        round_id = order.fields.get("round", 0)
        if order.kind == "transfer" and self.rounds.begin(round_id, needs_offer=False):
            self.sending[round_id], self.began[round_id] = order.fields["number"], self.now
        elif order.kind == "abort":
            self.abort(round_id)

    def abort(self, round_id: int) -> None:
        is_known = self.rounds.stage_of(round_id) is not None
        begun_s = self.now - self.began.pop(round_id, -math.inf) if is_known else NEVER
        self.rounds.abort(round_id)
        self.sending.pop(round_id, None)
        self.report(lambda c, now: c.send_failed(round_id, "aborted", now, begun_s))

    def end(self, round_id: int, is_ok: bool) -> None:
        del self.sending[round_id]
        self.rounds.end(round_id)
        if is_ok:
            self.report(lambda c, now: c.sent(round_id, BUCKET_BYTES * NUM_BUCKETS, now))
        else:
            self.report(lambda c, now: c.send_failed(round_id, "transport", now))
