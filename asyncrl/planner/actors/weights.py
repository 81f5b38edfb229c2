"""Weight sync: the real coordination, and beside it the publisher and the receivers as its peers.

  learner -publish-> publisher -published-> coordinator -orders-> publisher, receivers -commit-> replicas
Each side drives its pure machines: `Coordination`; `Allegiance`, `Attendance`, `Copies`, `Pin`. Bytes are
time alone. Several replicas may share a receiver (`Setting.cohort`); it swaps them in turn, as permits would.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from asyncrl.core.staleness import UNLOADED, PolicyVersion
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from asyncrl.planner.world import Actor, Args, World
from weight_sync.protocol.copies import Copies
from weight_sync.protocol.members import Card, PublisherSeat
from weight_sync.protocol.peer import Allegiance, Attendance, Hearing, Pin
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.rounds import ABORTED, NEVER, SUPERSEDED, TRANSPORT, Timing

COORDINATOR_NAME, PUBLISHER_NAME = "weight_sync.0", "publisher.0"
ABILITIES = frozenset({"gloo"})


def timing_of(setting: Setting) -> Timing:
    """Return the deadlines of weight sync at the setting's pace."""
    usual, pace = Timing.of(setting.sync_deadline_s), setting.pace
    return replace(usual, silence_s=pace.silence_s, dead_s=max(pace.dead_s, usual.dead_s))


class CoordinatorActor(Actor):
    """Drives `Coordination`; every call of it may order something."""

    def __init__(self, world: World, setting: Setting) -> None:
        super().__init__(world, COORDINATOR_NAME)
        kept = world.disk.setdefault(COORDINATOR_NAME, {"fences": {}})
        self._kept = kept
        members = setting.num_members + setting.standby
        self.coordination = Coordination(
            timing_of(setting),
            min(setting.parallelism, members),
            token=self.life,
            fences=kept["fences"],
        )
        self._tick_s = setting.pace.tick_s

    def begin(self) -> None:
        self.every(self._tick_s, self._tick)

    def on_hello(self, src: str, args: Args, call: int) -> None:
        is_in = self.coordination.hello(args["card"], self.world.now)
        self._post()
        self.answer(src, call, is_in=is_in, token=self.coordination.token)

    def on_publisher_hello(self, src: str, args: Args, call: int) -> None:
        seat = PublisherSeat(args["incarnation"], ABILITIES, "", 0, self.world.now, born=args["born"])
        is_in = self.coordination.publisher_hello(seat, args["current"], self.world.now)
        self._post()
        self.answer(src, call, is_in=is_in)

    def on_poll(self, src: str, args: Args, call: int) -> None:
        known = self.coordination.seen(args["name"], args["incarnation"], self.world.now)
        member = self.coordination.members.get(args["name"])
        self._post()
        self.answer(src, call, is_known=known, is_fenced=member is not None and member.is_fenced)

    def on_event(self, src: str, args: Args, call: int) -> None:
        """A member or the publisher reports; who is not known any more must say hello first."""
        name, method = args["name"], args["method"]
        if not self.coordination.seen(name, args["incarnation"], self.world.now):
            return
        given = (name, *args["given"]) if name != PUBLISHER else args["given"]
        getattr(self.coordination, method)(*given, now=self.world.now)
        self._post()

    def _tick(self) -> None:
        self.coordination.tick(self.world.now)
        self._post()

    def _post(self) -> None:
        orders = self.coordination.take_orders()
        self._kept["fences"] = self.coordination.fences
        for order in orders:
            dst = PUBLISHER_NAME if order.to == PUBLISHER else order.to
            self.tell(dst, "order", kind=order.kind, token=self.coordination.token, **order.fields)
        for record in self.coordination.take_records():
            self.world.note("sync", record=record)


class PublisherActor(Actor):
    """Holds versions of one learner, the newest token's, and sends them.

    Attributes:
        token: The newest fencing token that has published here.
        state: For the supervisor.
    """

    state = "READY"

    def __init__(self, world: World, setting: Setting, rates: Rates) -> None:
        super().__init__(world, PUBLISHER_NAME)
        self._setting, self._rates = setting, rates
        self._incarnation = f"{PUBLISHER_NAME}#{self.life}"
        self.current: PolicyVersion | None = None
        self.token = 0
        self._rounds = Attendance()
        self._allegiance = Allegiance()
        self._joined: dict[int, list[str]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._sending: dict[int, int] = {}

    def begin(self) -> None:
        self._greet()
        self.every(self._setting.pace.heartbeat_s, self._poll)

    def on_acquire(self, src: str, args: Args, call: int) -> None:
        if args["token"] < self.token:
            self.world.note("refused", op="acquire", src=src, error="FencedError")
            self.answer(src, call, has_room=False, is_fenced=True)
            return
        held = set(self._sending.values()) | ({self.current.number} if self.current else set())
        self.answer(src, call, has_room=len(held) < self._setting.num_buffers)

    def on_publish(self, src: str, args: Args, call: int) -> None:
        """Take a version over. An older token's is refused."""
        if args["token"] < self.token:
            self.world.note("refused", op="publish", src=src, error="FencedError")
            self.answer(src, call, is_taken=False, is_fenced=True)
            return
        self.token = args["token"]
        version = PolicyVersion(args["number"], args["step"])
        if self.current is None or version.number > self.current.number:
            self.current = version
            self.world.note("published", number=version.number, step=version.step, token=self.token)
            self._report("published", version)
        self.answer(src, call, is_taken=True)

    def on_order(self, src: str, args: Args, call: int) -> None:
        if self._allegiance.hear(args["token"]) is Hearing.OLDER:
            return
        round_id = args["round"]
        if args["kind"] == "transfer" and self._rounds.begin(round_id, needs_offer=False):
            if self.current is None or args["number"] != self.current.number:
                self._rounds.end(round_id)
                self._report("send_failed", round_id, SUPERSEDED)
                return
            self._sizes[round_id] = (args["world"] - 1, args["number"])
            self._sending[round_id] = args["number"]
            self._send_if_complete(round_id)
        elif args["kind"] == "abort":
            self._abort(round_id)

    def _abort(self, round_id: int) -> None:
        stage = self._rounds.abort(round_id)
        begun_s = math.inf if round_id in self._sizes else NEVER
        self._forget(round_id)
        if stage is not None:
            self._report("send_failed", round_id, ABORTED, begun_s=begun_s)

    def on_join(self, src: str, args: Args, call: int) -> None:
        """A receiver has opened its end of the round's group."""
        joined = self._joined.setdefault(args["round"], [])
        if src not in joined:
            joined.append(src)
        self._send_if_complete(args["round"])

    def _send_if_complete(self, round_id: int) -> None:
        size = self._sizes.get(round_id)
        if size is not None and len(self._joined.get(round_id, ())) >= size[0]:
            self.after(self._rates.transfer_s, self._finish, round_id)

    def _finish(self, round_id: int) -> None:
        if not self._rounds.end(round_id):
            return
        number, joined = self._sizes[round_id][1], self._joined[round_id]
        is_whole = all(name in self.world.actors for name in joined)  # a dead end breaks the group
        self._forget(round_id)
        for name in joined:
            self.tell(name, "bytes" if is_whole else "broken", round=round_id, number=number)
        if is_whole:
            self._report("sent", round_id, 1)
        else:
            self._report("send_failed", round_id, TRANSPORT)

    def _forget(self, round_id: int) -> None:
        for book in (self._sizes, self._joined, self._sending):
            book.pop(round_id, None)

    def _greet(self) -> None:
        args = {"incarnation": self._incarnation, "born": self.life, "current": self.current}
        self.call(COORDINATOR_NAME, "publisher_hello", args, lambda _: None)

    def _poll(self) -> None:
        args = {"name": PUBLISHER, "incarnation": self._incarnation}
        self.call(COORDINATOR_NAME, "poll", args, self._hear_poll, self._setting.pace.call_deadline_s)

    def _hear_poll(self, answer: Args | None) -> None:
        if answer is not None and not answer["is_known"]:
            self._greet()

    def _report(self, method: str, *given: object, **more: object) -> None:
        del more  # `begun_s` is infinite wherever it is not said
        args = {"name": PUBLISHER, "incarnation": self._incarnation, "method": method, "given": given}
        self.tell(COORDINATOR_NAME, "event", **args)


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
        self._incarnation = f"{name}#{self.life}"
        self.replicas = replicas
        self.serving = UNLOADED
        self._copies: Copies[Copy] = Copies(lambda copy: None)
        self._is_fenced, self._pin = False, Pin()
        self._attending: set[str] = set()
        self._rounds = Attendance()
        self._allegiance = Allegiance()
        self._to_swap: deque[str] = deque()
        self._swapping: set[str] = set()
        members = setting.num_members
        self._at_once = max(1, setting.parallelism // max(1, members))

    def begin(self) -> None:
        self._greet()
        for replica in self.replicas:
            self.tell(replica, "who_serves")
        self.every(self._setting.pace.heartbeat_s, self._poll)

    def on_order(self, src: str, args: Args, call: int) -> None:
        hearing = self._allegiance.hear(args["token"])
        if hearing is Hearing.OLDER:
            return
        if hearing is Hearing.NEWER:
            self._greet()
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
            self.tell(replica, "who_serves")

    def _withdraw(self) -> None:
        """Take back what was committed, and what replicas were told and have not loaded."""
        self._copies.withdraw()
        self._copies.untake()
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
            self.world.note("verified", name=self.name, number=args["number"])
            self._report("verified", args["round"], args["number"])

    def on_broken(self, src: str, args: Args, call: int) -> None:
        if self._rounds.end(args["round"]):
            self._report("failed", args["round"], TRANSPORT)

    def on_attend(self, src: str, args: Args, call: int) -> None:
        """A replica asks for weights; it serves `number`, nothing if it has just been started."""
        self._attending.add(src)
        self._note_pin(self._pin.meet(args["life"]))
        if args["number"] < self.serving or src in self._swapping:
            self._swapping.discard(src)
            self.serving = args["number"]
            self._copies.untake()
            self._note_pin(self._pin.end())
            self._report("restarted", args["number"])
        elif len(self.replicas) == 1:
            self.serving = args["number"]
        self._report("attended")
        self.tell(src, "fence", is_fenced=self._is_fenced)

    def on_pin(self, src: str, args: Args, call: int) -> None:
        self._note_pin(self._pin.set(args["life"], True))

    def on_unpin(self, src: str, args: Args, call: int) -> None:
        self._note_pin(self._pin.set(args["life"], False))

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

    def _greet(self) -> None:
        card = Card(
            self.name,
            self._incarnation,
            ABILITIES,
            serving=self.serving,
            staged=max(self._copies.newest_verified, self._copies.taken_number),
            is_attended=len(self._attending) == len(self.replicas),
            is_pinned=self._pin.is_held,
            born=self.life,
        )
        self.call(COORDINATOR_NAME, "hello", {"card": card}, self._hear_hello)

    def _hear_hello(self, answer: Args | None) -> None:
        if answer is not None:
            self._allegiance.hear(answer["token"])

    def _poll(self) -> None:
        args = {"name": self.name, "incarnation": self._incarnation}
        self.call(COORDINATOR_NAME, "poll", args, self._hear_poll, self._setting.pace.call_deadline_s)

    def _hear_poll(self, answer: Args | None) -> None:
        if answer is None:
            return
        if not answer["is_known"]:
            self._greet()
        if answer["is_fenced"] != self._is_fenced:
            self._is_fenced = answer["is_fenced"]
            for replica in self.replicas:
                self.tell(replica, "fence", is_fenced=self._is_fenced)

    def _report(self, method: str, *given: object) -> None:
        args = {"name": self.name, "incarnation": self._incarnation, "method": method, "given": given}
        self.tell(COORDINATOR_NAME, "event", **args)
