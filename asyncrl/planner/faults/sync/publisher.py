"""The publisher's process: does what `weight_sync.publisher` does, around the real segment pool."""

from __future__ import annotations

import math

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import read_message
from asyncrl.core.staleness import UNLOADED
from asyncrl.planner.faults.checks.observer import Observer
from asyncrl.planner.faults.kernel.process import Process, Switchboard
from asyncrl.planner.faults.sync.carriage import Carriage, Seat
from asyncrl.planner.faults.sync.content import NUM_BUCKETS, nodes_in
from asyncrl.planner.faults.sync.liaison import SimulatedLiaison
from weight_sync.carrier import TransferOrder
from weight_sync.liaison import Introduction, Reset
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.pool import SegmentPool, Slot
from weight_sync.protocol.messages import Transfer
from weight_sync.protocol.peer import Attendance
from weight_sync.protocol.protocol import PUBLISHER
from weight_sync.protocol.rounds import ABORTED, NEVER, SUPERSEDED, TRANSPORT

TICK_S = 0.5


class PublisherProcess(Process):
    """See the module."""

    def __init__(
        self, board: Switchboard, prefix: str, carriage: Carriage, observer: Observer, start_s: float
    ) -> None:
        super().__init__(board, "publisher.0")
        self._prefix, self._carriage, self._observer, self._start_s = prefix, carriage, observer, start_s
        self._pool: SegmentPool | None = None
        self._liaison = SimulatedLiaison(self, PUBLISHER, self._introduce, self._obey)
        self._rounds = Attendance()
        self._sending: dict[int, float] = {}
        self._current: Manifest | None = None
        self._early: list[Request] = []

    @property
    def newest_number(self) -> int:
        """The version number that it would send, 0 for none."""
        return self._current.version.number if self._current else UNLOADED

    @property
    def pool(self) -> SegmentPool:
        assert self._pool is not None, "it has begun to serve"
        return self._pool

    def begin(self) -> None:
        """Take over the segments of the one before, and say hello."""
        self.spawn(self._live())

    async def _live(self) -> None:
        await self.sleep(self._start_s)
        self._pool = SegmentPool(f"{self._prefix}publisher-", self.name.replace("/", "."))
        self._current = self._pool.current.manifest if self._pool.current else None
        self._liaison.start()
        self.state = "READY"
        early, self._early = self._early, []
        for request in early:
            self.handle(request)
        while True:
            await self.sleep(TICK_S)
            self._pool.prepare()

    # --- the learner ------------------------------------------------------------------------------

    def handle(self, request: Request) -> None:
        """Answer the learner."""
        if self._pool is None:
            self._early.append(request)
            return
        if request.op == "current":
            request.reply(number=self.newest_number)
            return
        try:
            path = self._answer(request)
            request.reply(path=path)
        except AsyncrlError as error:
            request.fail(error)

    def _answer(self, request: Request) -> str:
        """Do what the learner asks; return the path of a segment, if it asks for one."""
        token = request.args["token"]
        if request.op == "open":
            self.pool.open(token)
            self._observer.opened(self.name, token)
            return ""
        if request.op == "acquire":
            path = self.pool.acquire(token, request.args["num_bytes"]) or ""
            return "" if self._liaison.is_fenced else path
        assert request.op == "commit", f"a publisher knows no '{request.op}'"
        data = bytes(request.frames[0])
        manifest = Manifest.from_bytes(data, self._current)
        self.pool.commit(token, request.args["path"], manifest)
        if manifest != self._current:
            self._current = manifest
            current = self.pool.current
            assert current is not None and current.bytes_B is not None, "it was committed"
            node = nodes_in(current.bytes_B.numpy().tobytes())[0]
            self._observer.written(self.name, token, manifest.version.number, node)
            self._liaison.report("published", [data])
        return ""

    # --- orders -----------------------------------------------------------------------------------

    def _introduce(self) -> Introduction:
        args = {"store_host": "127.0.0.1", "store_port": 1, "abilities": ["gloo"]}
        return Introduction(args, [self._current.to_bytes()] if self._current else [])

    def _obey(self, token: int, kind: str, fields: dict[str, int], manifest: bytes) -> None:
        if kind == Reset.kind:
            for round_id in self._rounds.open_rounds:
                self._abort(round_id)
            return
        self._observer.obeys(self.name, token)
        if kind == "transfer":
            self._send(TransferOrder.of(read_message(fields, Transfer, kind)))
        elif kind == "abort":
            self._abort(fields["round"])

    def _send(self, order: TransferOrder) -> None:
        if not self._rounds.begin(order.round, needs_offer=False):
            return
        slot = self.pool.hold(order.number)
        if slot is None or slot.bytes_B is None:
            self._rounds.end(order.round)
            self._liaison.report("send_failed", round=order.round, cause=SUPERSEDED)
            return
        bytes_B, manifest = slot.bytes_B, slot.manifest
        assert manifest is not None, "a slot that is held holds a version"

        def read(index: int) -> bytes:
            start, end = manifest.bucket_range(index)
            return bytes_B.numpy()[start:end].tobytes()

        self._sending[order.round] = self.now
        seat = Seat(self, order, read, None, lambda cause: self._end(slot, order, cause))
        self._carriage.join(seat, NUM_BUCKETS)

    def _end(self, slot: Slot, order: TransferOrder, cause: str) -> None:
        self.pool.release(slot)
        self._sending.pop(order.round, None)
        self._rounds.end(order.round)
        if cause:
            self._liaison.report("send_failed", round=order.round, cause=TRANSPORT)
        else:
            self.pool.note_sent(slot)
            self._liaison.report("sent", round=order.round, num_bytes=slot.num_bytes)

    def _abort(self, round_id: int) -> None:
        is_known, now = self._rounds.stage_of(round_id) is not None, self.now
        begun_s = now - self._sending.get(round_id, -math.inf) if is_known else NEVER
        self._rounds.abort(round_id)
        self._liaison.report("send_failed", round=round_id, cause=ABORTED, begun_s=begun_s)
        if round_id in self._sending:
            del self._sending[round_id]
            self._carriage.leave(self, round_id)
