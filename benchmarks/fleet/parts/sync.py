"""Computation of weight sync's coordinator for a fleet of any size: the service, without its sockets.

Owns a publisher and receivers that obey each order at once, and the clock. Each request is read in a turn of
its own, which is the dearest way: those of many replicas come at different times. The processor time of the
coordinator alone counts: its requests, the ends of its turns and its timers, answers packed.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from asyncrl.core.errors import AsyncrlError, SyncError
from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import read_message
from asyncrl.core.rpc.request import read_reply
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.staleness import UNLOADED, PolicyVersion
from asyncrl.core.wire import Frame
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan
from weight_sync.protocol.messages import NEXT_ORDER, NumberedOrder, Orders
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.rounds import Timing

DEADLINE_S = 60.0
INCARNATION = "1"
GAP_S = 1e-5
"""Between two requests."""


class SteppedRuntime(ThreadRuntime):
    """Its clock moves only when it is told to."""

    now_s = 100.0

    def now(self) -> float:
        return self.now_s


class SyncFleet:
    """A coordinator with `num_members` that swap all at once."""

    def __init__(self, num_members: int) -> None:
        self._runtime, self._spent_s = SteppedRuntime(), 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="asyncrl-bench-")
        folder = Path(self._folder.name)
        self._coordination = Coordination(Timing.of(DEADLINE_S), parallelism=num_members, token=1)
        bind = f"ipc://{folder / 'coordinator'}"
        self._service = CoordinatorService(self._coordination, self._runtime, bind, None, folder)
        self._answers: deque[tuple[str, str, Sequence[Frame]]] = deque()
        self._orders: deque[tuple[str, NumberedOrder]] = deque()
        self._after = dict.fromkeys((PUBLISHER, *(f"receiver.{index}" for index in range(num_members))), 0)
        self._number = self._num_polls = 0
        self._ask(PUBLISHER, "publisher_hello", store_host="", store_port=0)
        for name in list(self._after)[1:]:
            self._ask(name, "hello", serving=UNLOADED, staged=UNLOADED, attended=True, pinned=False)
        self._answers.clear()
        for name in self._after:
            self._ask(name, "next_order", after=0)
            self._runtime.now_s += self._coordination.timing.poll_s / len(self._after)

    def close(self) -> None:
        """End the coordinator, and remove its journal."""
        over = ThreadEvent()
        over.set()
        self._service.run(over)
        self._folder.cleanup()

    def sync(self, num_versions: int) -> float:
        """Bring so many versions to everyone, and return the processor seconds.

        Raises:
            SyncError: A version did not reach everyone.
        """
        spent_s = self._spent_s
        for _ in range(num_versions):
            self._number += 1
            self._tell(PUBLISHER, "published", [manifest_of(self._number)])
            while self._orders:
                self._obey(*self._orders.popleft())
        members = self._coordination.members.values()
        if late := [one.name for one in members if one.serving != self._number]:
            raise SyncError(f"version {self._number} did not reach {len(late)} of {len(members)}")
        return self._spent_s - spent_s

    def beat(self, num_rounds: int) -> float:
        """Let the poll of every peer return empty so often, and return the processor seconds."""
        spent_s, end = self._spent_s, self._num_polls + num_rounds * len(self._after)
        while self._num_polls < end:
            self._runtime.now_s = max(self._runtime.now_s, self._service.wake_at())
            self._take_turn(None)
            self._hear_answers()
        return self._spent_s - spent_s

    def _obey(self, name: str, order: NumberedOrder) -> None:
        round_, number = order.fields.get("round"), order.fields.get("number")
        if order.kind == "transfer" and name == PUBLISHER:
            self._tell(name, "sent", round=round_, num_bytes=1)
        elif order.kind == "transfer":
            self._tell(name, "verified", round=round_, number=number)
        elif order.kind == "offer":
            self._tell(name, "accepted", round=round_)
        elif order.kind == "commit":
            self._tell(name, "loaded", number=number, ok=True, error="")

    def _tell(self, name: str, event: str, frames: Sequence[Frame] = (), **fields: object) -> None:
        self._ask(name, "report", frames, event=event, fields=fields)
        self._hear_answers()

    def _hear_answers(self) -> None:
        """Take the orders, and poll again at once."""
        while self._answers:
            name, op, frames = self._answers.popleft()
            _, reply = read_reply(list(frames))
            if isinstance(reply, AsyncrlError):
                raise reply
            if op == NEXT_ORDER.name:
                found = read_message(reply.args, Orders, op).orders
                self._orders += ((name, order) for order in found)
                self._after[name] = found[-1].seq if found else self._after[name]
                self._num_polls += 1
                self._ask(name, op, after=self._after[name])

    def _ask(self, name: str, op: str, frames: Sequence[Frame] = (), **args: object) -> None:
        answer = partial(self._note_answer, name, op)
        told = {"name": name, "incarnation": INCARNATION, **args}
        self._runtime.now_s += GAP_S
        self._take_turn(Request(op, told, list(frames), name.encode(), 1, answer))

    def _note_answer(self, name: str, op: str, frames: Sequence[Frame]) -> None:
        self._answers.append((name, op, frames))

    def _take_turn(self, request: Request | None) -> None:
        """Do what the server's loop does for one request, or when it wakes up without one."""
        service, began_s = self._service, time.thread_time()
        if request is not None:
            service.handle(request)
            service.end_turn()
        now_s = self._runtime.now_s
        if now_s >= service.wake_at():
            service.tick(now_s)
        self._spent_s += time.thread_time() - began_s


def manifest_of(number: int) -> bytes:
    """Return the manifest of a version of one byte."""
    layout = plan([TensorSpec("w", "uint8", (1,))], 1024)
    manifest = Manifest(PolicyVersion(number, number), layout, (Bucket(layout.total_bytes, "0" * 32),))
    return manifest.to_bytes()
