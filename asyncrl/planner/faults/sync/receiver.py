"""A receiver's process: does what `weight_sync.receiver` does, around the real shelf and `Attendance`."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.core.errors import SyncError, WireError
from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import read_message
from asyncrl.core.staleness import UNLOADED
from asyncrl.planner.faults.checks.observer import Observer
from asyncrl.planner.faults.kernel.process import Process, Switchboard
from asyncrl.planner.faults.sync.carriage import Carriage, Seat
from asyncrl.planner.faults.sync.content import NUM_BUCKETS, is_right, nodes_in
from asyncrl.planner.faults.sync.liaison import SimulatedLiaison
from weight_sync.carrier import TransferOrder
from weight_sync.coordination.mail import ReportLog
from weight_sync.liaison import Introduction, Reset
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.shelf import Copy, Shelf
from weight_sync.protocol.messages import Transfer
from weight_sync.protocol.peer import Attendance, Pin, Stage
from weight_sync.protocol.rounds import ABORTED
from weight_sync.receiver import PINS

TICK_S = 0.2


@dataclass
class _Incoming:
    copy: Copy
    seat: Seat | None = None


class ReceiverProcess(Process):
    """See the module."""

    def __init__(
        self,
        board: Switchboard,
        index: int,
        prefix: str,
        carriage: Carriage,
        observer: Observer,
        lost_s: float,
        start_s: float,
    ) -> None:
        super().__init__(board, f"receiver.{index}")
        self._shelf = Shelf(f"{prefix}receiver.{index}-", self.name.replace("/", "."))
        self._carriage, self._observer = carriage, observer
        self._lost_s, self._start_s = lost_s, start_s
        self._liaison = SimulatedLiaison(self, self.service, self._introduce, self._obey)
        self._rounds = Attendance()
        self._incoming: dict[int, _Incoming] = {}
        self._serving = UNLOADED
        self._is_attended = self._is_draining = False
        self._parked: tuple[Request, float] | None = None
        self._heard = ReportLog()
        self._pin = Pin()
        self._life, self._newest_born = "", 0
        self._is_open = False
        self._early: list[Request] = []

    def begin(self) -> None:
        """Say hello, and serve the replica."""
        self.spawn(self._live())

    async def _live(self) -> None:
        await self.sleep(self._start_s)
        self._liaison.start()
        self._is_open, self.state = True, "SYNCING"
        early, self._early = self._early, []
        for request in early:
            self.handle(request)
        while True:
            then = self.now
            await self.sleep(TICK_S)
            if self.now - then > 1.0:
                self._liaison.note_pause(self.now - then)
            self._tick()

    def _tick(self) -> None:
        if self._liaison.lost_for_s >= self._lost_s:
            for round_id in self._rounds.open_rounds:
                self._abort(round_id)
            self._shelf.commit_verified()
        self._answer_poll()
        if self._parked is not None and self.now >= self._parked[1]:
            self._end_poll(None)
        self.state = "DRAINING" if self._is_draining else "READY" if self._serving else "SYNCING"

    # --- the replica ------------------------------------------------------------------------------

    def handle(self, request: Request) -> None:
        """Answer the replica."""
        if not self._is_open:
            self._early.append(request)
        elif self._is_past(request):
            request.reply(path="", fenced=True)
        elif self._is_late(request):
            request.reply(path="", fenced=self._liaison.is_fenced)
        elif request.op == "next_staged":
            self._take_poll(request)
        elif request.op == "loaded":
            self._take_loaded(request)
        elif request.op in PINS:
            self._observer.pins(self.name, request.args["life"] if request.op == "pin" else "")
            self._note_pin(self._pin.set(request.args["life"], request.op == "pin"))
            request.reply()
        else:
            assert request.op == "drain", f"a receiver knows no '{request.op}'"
            if not self._is_draining:
                self._is_draining = True
                self._liaison.report("drain")
            request.reply()
        self._answer_poll()

    def _is_past(self, request: Request) -> bool:
        born = request.args["born"]
        self._newest_born = max(self._newest_born, born)
        return bool(born < self._newest_born)

    def _is_late(self, request: Request) -> bool:
        if "seq" not in request.args:
            return False
        line = "pins" if request.op in PINS else "polls"
        return not self._heard.is_new(line, request.args["life"], request.args["seq"])

    def _note_pin(self, has_changed: bool) -> None:
        if not has_changed:
            return
        if self._pin.is_held:
            self._shelf.withdraw()
        self._liaison.report("pin" if self._pin.is_held else "unpin")

    @property
    def is_pinned(self) -> bool:
        """Whether it holds its replica at a version."""
        return self._pin.is_held

    def _take_poll(self, request: Request) -> None:
        if self._parked is not None:
            self._end_poll(None)
        self._meet(request.args["life"])
        self._note_serving(request.args["serving"])
        if self._pin.is_held:
            self._observer.holds(self.name, request.args["life"])
        if not self._is_attended:
            self._is_attended = True
            self._liaison.report("attended")
        self._parked = (request, self.now + request.args["wait_s"])

    def _meet(self, life: str) -> None:
        self._note_pin(self._pin.meet(life))
        if life != self._life:
            self._life = life
            self._shelf.disown()

    def _note_serving(self, serving: int) -> None:
        if serving < self._serving:
            self._serving = serving
            self._shelf.untake()
            self._note_pin(self._pin.end())
            self._liaison.report("restarted", serving=serving)
        elif serving > self._serving:
            self._serving = serving
            self._shelf.finish_load(serving, is_ok=True)
            self._liaison.report("loaded", number=serving, ok=True, error="")

    def _take_loaded(self, request: Request) -> None:
        number, is_ok = request.args["number"], request.args["ok"]
        self._shelf.finish_load(number, is_ok)
        self._serving = number if is_ok else UNLOADED
        self._liaison.report("loaded", number=number, ok=is_ok, error=request.args["error"])
        request.reply()

    def _answer_poll(self) -> None:
        if self._parked is None or self._pin.is_held:
            return
        if (copy := self._shelf.take(self._serving)) is not None:
            self._end_poll(copy)

    def _end_poll(self, copy: Copy | None) -> None:
        assert self._parked is not None, "somebody waits"
        request, self._parked = self._parked[0], None
        if copy is None:
            request.reply(path="", fenced=self._liaison.is_fenced)
            return
        self._observer.handed_over(self.name, copy.number, nodes_in(copy.bytes_B.numpy().tobytes()))
        request.reply([copy.manifest.to_bytes()], path=copy.path, fenced=self._liaison.is_fenced)

    # --- orders -----------------------------------------------------------------------------------

    def _introduce(self) -> Introduction:
        return Introduction(
            {
                "abilities": ["gloo"],
                "serving": self._serving,
                "staged": max(self._shelf.newest_verified, self._shelf.taken_number),
                "attended": self._is_attended,
                "pinned": self._pin.is_held,
                "draining": self._is_draining,
                "base": self._shelf.base_number,
            }
        )

    def _obey(self, token: int, kind: str, fields: dict[str, int], manifest: bytes) -> None:
        if kind == Reset.kind:
            for round_id in self._rounds.open_rounds:
                self._abort(round_id)
            return
        self._observer.obeys(self.name, token)
        if kind == "offer":
            self._accept(fields["round"], manifest)
        elif kind == "transfer":
            self._receive(TransferOrder.of(read_message(fields, Transfer, kind)))
        elif kind == "abort":
            self._abort(fields["round"])
        elif kind == "commit":
            if not self._pin.is_held:
                self._shelf.commit(fields["number"])
        else:
            assert kind == "withdraw", f"an order '{kind}' means nothing"
            self._shelf.withdraw()
            self._is_attended = False
        self._answer_poll()

    def _accept(self, round_id: int, manifest: bytes) -> None:
        if self._rounds.offer(round_id):
            try:
                copy = self._shelf.make_room(Manifest.from_bytes(manifest))
            except (SyncError, WireError) as error:
                self._rounds.abort(round_id)
                self._liaison.report("failed", round=round_id, cause=f"refused: {error.message}"[:200])
                return
            self._incoming[round_id] = _Incoming(copy)
        if round_id in self._incoming:
            self._liaison.report("accepted", round=round_id)

    def _receive(self, order: TransferOrder) -> None:
        if not self._rounds.begin(order.round):
            return
        incoming = self._incoming[order.round]
        copy = incoming.copy

        def write(index: int, bucket: bytes) -> bool:
            start, end = copy.manifest.bucket_range(index)
            copy.bytes_B.numpy()[start:end] = list(bucket)
            return is_right(copy.manifest, index, bucket)

        incoming.seat = Seat(self, order, None, write, lambda cause: self._end(order, cause))
        self._carriage.join(incoming.seat, NUM_BUCKETS)

    def _end(self, order: TransferOrder, cause: str) -> None:
        if not self._rounds.end(order.round):
            self._shelf.end_abandoned(order.round)
            self._answer_poll()
            return
        incoming = self._incoming.pop(order.round)
        if cause:
            num_buckets = incoming.seat.num_buckets if incoming.seat else 0
            self._shelf.give_back(incoming.copy)
            self._liaison.report("failed", round=order.round, cause=cause, num_buckets=num_buckets)
        else:
            self._shelf.put_verified(incoming.copy)
            self._liaison.report("verified", round=order.round, number=order.number)
        self._answer_poll()

    def _abort(self, round_id: int) -> None:
        stage = self._rounds.abort(round_id)
        if stage is None:
            return
        incoming = self._incoming.pop(round_id)
        if stage is Stage.OFFERED or incoming.seat is None:
            self._shelf.give_back(incoming.copy)
        else:
            self._shelf.abandon(round_id, incoming.copy)
            self._carriage.leave(self, round_id)
        num_buckets = incoming.seat.num_buckets if incoming.seat else 0
        self._liaison.report("failed", round=round_id, cause=ABORTED, num_buckets=num_buckets)
