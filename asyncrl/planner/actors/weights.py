"""Weight sync: the real coordination, and beside it the publisher and the receivers as its peers.

  learner -publish-> publisher -published-> coordinator -orders-> publisher, receivers -commit-> replicas
Each side drives its pure machines: `Coordination`; `Slots`, `RoundTracker`, `Copies`, `Pin`. Bytes are time
alone. Several replicas may share a receiver (`Setting.cohort`); it swaps them in turn, as the scheduler does.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from asyncrl.core.staleness import UNLOADED, PolicyVersion
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import DEAD_S, HEARTBEAT_S, SILENCE_S, TICK_S, Setting
from asyncrl.planner.world import Actor, Args, World
from weight_sync.protocol.copies.slots import NUM_SLOTS, Copies, Slots
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.messages import ReceiverHello
from weight_sync.protocol.peer import Pin, RoundTracker
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.rounds import ABORTED, SUPERSEDED, Timing
from weight_sync.protocol.swap_scheduler import max_loads

COORDINATOR_NAME, PUBLISHER_NAME = "weight_sync.0", "publisher.0"


def timing_of(setting: Setting) -> Timing:
    """Return the deadlines of weight sync, stretched for members that speak seldom and tell no progress."""
    usual = Timing.of(setting.sync_deadline_s)
    return replace(usual, silence_s=SILENCE_S, dead_s=max(DEAD_S, usual.dead_s), stall_s=math.inf)


class CoordinatorActor(Actor):
    """Drives `Coordination`; every call of it may order something."""

    def __init__(self, world: World, setting: Setting) -> None:
        super().__init__(world, COORDINATOR_NAME)
        members = setting.num_members + setting.standby
        at_once = min(setting.parallelism, members)
        self.coordination = Coordination(
            timing_of(setting), at_once, token=1, max_unavailable=setting.max_unavailable
        )

    def begin(self) -> None:
        self.every(TICK_S, self._tick)

    def on_hello(self, src: str, args: Args, call: int) -> None:
        self.coordination.hello(args["info"], self.world.now)
        self._post()

    def on_publisher_hello(self, src: str, args: Args, call: int) -> None:
        publisher = PublisherInfo(PUBLISHER_NAME, "", 0, self.world.now, started_ms=1)
        self.coordination.publisher_hello(publisher, None, self.world.now)
        self._post()

    def on_poll(self, src: str, args: Args, call: int) -> None:
        self.coordination.seen(args["name"], src, self.world.now)
        member = self.coordination.members.get(args["name"])
        self._post()
        self.answer(src, call, is_fenced=member is not None and member.is_fenced)

    def on_event(self, src: str, args: Args, call: int) -> None:
        """A member or the publisher reports."""
        name = args["name"]
        self.coordination.seen(name, src, self.world.now)
        given = (name, *args["given"]) if name != PUBLISHER else args["given"]
        getattr(self.coordination, args["method"])(*given, now=self.world.now, **args["named"])
        self._post()

    def _tick(self) -> None:
        self.coordination.tick(self.world.now)
        self._post()

    def _post(self) -> None:
        for order in self.coordination.take_orders():
            dst = PUBLISHER_NAME if order.to == PUBLISHER else order.to
            self.tell(dst, "order", kind=order.kind, **order.fields)
        self.coordination.take_records()


@dataclass(eq=False)
class Slot:
    """A segment of the publisher, without its bytes."""

    number: int = UNLOADED
    is_writing: bool = False
    num_transfers: int = 0


class PublisherActor(Actor):
    """Holds the learner's versions, and sends them."""

    state = "READY"

    def __init__(self, world: World, setting: Setting, rates: Rates) -> None:
        super().__init__(world, PUBLISHER_NAME)
        self._setting, self._rates = setting, rates
        self._slots: Slots[Slot] = Slots([Slot() for _ in range(NUM_SLOTS)])
        self._rounds = RoundTracker()
        self._joined: dict[int, list[str]] = {}
        self._sizes: dict[int, int] = {}
        self._sending: dict[int, Slot] = {}
        self._waiting: tuple[str, int] | None = None

    def begin(self) -> None:
        self.tell(COORDINATOR_NAME, "publisher_hello")
        self.every(HEARTBEAT_S, self._poll)

    def on_acquire(self, src: str, args: Args, call: int) -> None:
        slot = self._slots.next_to_write()
        if slot is not None:
            slot.number, slot.is_writing = UNLOADED, True
        self.answer(src, call, has_room=slot is not None)

    def on_await_room(self, src: str, args: Args, call: int) -> None:
        self._waiting = src, call
        self._tell_room()

    def _tell_room(self) -> None:
        """Answer the parked `await_room`, if there is one and a free slot."""
        if self._waiting is not None and self._slots.next_to_write() is not None:
            waiting, self._waiting = self._waiting, None
            self.answer(*waiting)

    def on_publish(self, src: str, args: Args, call: int) -> None:
        """Take over what was written."""
        slot = self._slots.next_to_write()
        assert slot is not None and slot.is_writing, "it was acquired"
        slot.number, slot.is_writing = args["number"], False
        self._slots.current = slot
        self.world.note("published", number=slot.number)
        version, num_bytes = PolicyVersion(slot.number, args["step"]), int(self._rates.version_bytes)
        self._report("published", version, num_bytes=num_bytes)
        self.answer(src, call)

    def on_order(self, src: str, args: Args, call: int) -> None:
        round_id = args["round"]
        if args["kind"] == "transfer" and self._rounds.begin(round_id, needs_offer=False):
            slot = self._slots.hold(args["number"])
            if slot is None:
                self._rounds.end(round_id)
                self._report("send_failed", round_id, SUPERSEDED)
                return
            self._sizes[round_id], self._sending[round_id] = args["world"] - 1, slot
            self._send_if_complete(round_id)
        elif args["kind"] == "abort":
            self._abort(round_id)

    def _abort(self, round_id: int) -> None:
        stage = self._rounds.abort(round_id)
        self._forget(round_id)
        if stage is not None:
            self._report("send_failed", round_id, ABORTED)

    def on_join(self, src: str, args: Args, call: int) -> None:
        """A receiver has opened its end of the round's group."""
        joined = self._joined.setdefault(args["round"], [])
        if src not in joined:
            joined.append(src)
        self._send_if_complete(args["round"])

    def _send_if_complete(self, round_id: int) -> None:
        size = self._sizes.get(round_id)
        if size is not None and len(self._joined.get(round_id, ())) >= size:
            self.after(self._rates.transfer_s, self._finish, round_id)

    def _finish(self, round_id: int) -> None:
        if not self._rounds.end(round_id):
            return
        number, joined = self._sending[round_id].number, self._joined[round_id]
        self._forget(round_id)
        for name in joined:
            self.tell(name, "bytes", round=round_id, number=number)
        self._report("sent", round_id, 1)

    def _forget(self, round_id: int) -> None:
        self._sizes.pop(round_id, None)
        self._joined.pop(round_id, None)
        slot = self._sending.pop(round_id, None)
        if slot is not None:
            self._slots.release(slot)
            self._tell_room()

    def _poll(self) -> None:
        self.call(COORDINATOR_NAME, "poll", {"name": PUBLISHER}, lambda _: None)

    def _report(self, method: str, *given: object, **named: object) -> None:
        self.tell(COORDINATOR_NAME, "event", name=PUBLISHER, method=method, given=given, named=named)


@dataclass(frozen=True)
class Copy:
    """A version that has arrived, without its bytes."""

    number: int


class ReceiverActor(Actor):
    """A member of the protocol, beside its replicas.

    Attributes:
        replicas: Names of those that it serves; one, but in a large fleet.
        serving: The version that all its replicas have loaded.
    """

    state = "READY"

    def __init__(self, world: World, name: str, setting: Setting, replicas: tuple[str, ...]) -> None:
        super().__init__(world, name)
        self._setting = setting
        self.replicas = replicas
        self.serving = UNLOADED
        self._copies: Copies[Copy] = Copies(lambda copy: None)
        self._is_fenced, self._pin = False, Pin()
        self._attending: set[str] = set()
        self._rounds = RoundTracker()
        self._to_swap: deque[str] = deque()
        self._swapping: set[str] = set()
        at_once = max_loads(setting.parallelism, setting.max_unavailable, setting.replicas)
        self._at_once = max(1, at_once // max(1, setting.num_members))

    def begin(self) -> None:
        info = ReceiverHello(
            name=self.name,
            incarnation=self.name,
            serving=UNLOADED,
            staged=UNLOADED,
            attended=False,
            pinned=False,
            started_ms=1,
        )
        self.tell(COORDINATOR_NAME, "hello", info=info)
        self.every(HEARTBEAT_S, self._poll)

    def on_order(self, src: str, args: Args, call: int) -> None:
        getattr(self, "_obey_" + args["kind"])(args)

    def _obey_offer(self, args: Args) -> None:
        if self._rounds.offer(args["round"]):
            self._report("accepted", args["round"])

    def _obey_transfer(self, args: Args) -> None:
        if self._rounds.begin(args["round"]):
            self.tell(PUBLISHER_NAME, "join", round=args["round"])

    def _obey_abort(self, args: Args) -> None:
        if self._rounds.abort(args["round"]) is not None:
            self._report("failed", args["round"], ABORTED)

    def _obey_withdraw(self, args: Args) -> None:
        self._withdraw()
        for replica in self.replicas:
            self.tell(replica, "withdrawn")

    def _withdraw(self) -> None:
        """Take back what was committed, and what replicas were told and have not loaded."""
        self._copies.withdraw()
        self._copies.release_copies()
        self._to_swap.clear()
        self._swapping.clear()

    def _obey_commit(self, args: Args) -> None:
        if not self._pin.is_held:
            self._copies.commit(args["number"])
            self._hand_over()

    def _hand_over(self) -> None:
        """Have the replicas load what is committed."""
        before, copy = self._copies.taken, self._copies.take(self.serving)
        if copy is not None and copy is not before:
            self._to_swap = deque(name for name in self.replicas if name in self._attending)
            self._swap_more()

    def on_bytes(self, src: str, args: Args, call: int) -> None:
        """All buckets of the round are here."""
        if self._rounds.end(args["round"]):
            self._copies.put_verified(Copy(args["number"]))
            self._report("verified", args["round"], args["number"])

    def on_attend(self, src: str, args: Args, call: int) -> None:
        """A replica asks for weights; it serves `number`, nothing if it has just been started."""
        self._attending.add(src)
        if args["number"] < self.serving or src in self._swapping:
            self._swapping.discard(src)
            self.serving = args["number"]
            self._copies.release_copies()
            self._report("restarted", args["number"])
        elif len(self.replicas) == 1:
            self.serving = args["number"]
        self._report("attended")
        self.tell(src, "fence", is_fenced=self._is_fenced)

    def on_pin(self, src: str, args: Args, call: int) -> None:
        self._note_pin(self._pin.set(src, True))

    def on_unpin(self, src: str, args: Args, call: int) -> None:
        self._note_pin(self._pin.set(src, False))

    def _note_pin(self, has_changed: bool) -> None:
        if not has_changed:
            return
        if self._pin.is_held:  # what was handed over is not taken up
            self._withdraw()
        self._report("pin" if self._pin.is_held else "unpin")

    def on_swapped(self, src: str, args: Args, call: int) -> None:
        if args["number"] != self._copies.taken_number:
            return
        self._swapping.discard(src)
        self._swap_more()
        if not self._swapping and not self._to_swap:
            self.serving = args["number"]
            self._copies.finish_load(self.serving, is_ok=True)
            self._report("loaded", self.serving, True, "")
            self._hand_over()

    def _swap_more(self) -> None:
        while self._to_swap and len(self._swapping) < self._at_once:
            replica = self._to_swap.popleft()
            self._swapping.add(replica)
            self.tell(replica, "swap", number=self._copies.taken_number)

    def _poll(self) -> None:
        self.call(COORDINATOR_NAME, "poll", {"name": self.name}, self._hear_poll)

    def _hear_poll(self, answer: Args) -> None:
        if answer["is_fenced"] != self._is_fenced:
            self._is_fenced = answer["is_fenced"]
            for replica in self.replicas:
                self.tell(replica, "fence", is_fenced=self._is_fenced)

    def _report(self, method: str, *given: object) -> None:
        self.tell(COORDINATOR_NAME, "event", name=self.name, method=method, given=given, named={})
