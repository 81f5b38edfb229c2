"""Replica of a receiver: its calls, the version it serves, its pin, and its poll for the next copy.

Owns the answer that a poll waits for, and the order of calls: those of a superseded process of the replica,
or behind a newer call, change nothing. Invariant: a pinned replica is handed no copy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import Answer, Operation
from asyncrl.core.rpc.operations import Operations, send_answer
from asyncrl.core.runtime.clock import Clock
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.staleness import UNLOADED
from weight_sync import messages as wire
from weight_sync.coordination.order_queue import ReportLog
from weight_sync.coordinator_session import CoordinatorSession
from weight_sync.direct.orders import ASK_ORDER, SEAT_ENDED
from weight_sync.memory.staging_area import Copy, StagingArea
from weight_sync.protocol import messages as told
from weight_sync.protocol.peer import Pin

R = TypeVar("R", bound=wire.OfReplica)
PINS = (wire.PIN.name, wire.UNPIN.name)
REPLICA_OPS = (
    wire.NEXT_STAGED.name,
    wire.LOADED.name,
    wire.DRAIN.name,
    *PINS,
    ASK_ORDER.name,
    SEAT_ENDED.name,
)
"""Operations that a replica may call on its receiver; services call all others."""


@dataclass
class _Parked:
    request: Request
    until: float


class ReplicaSession:
    """See the module. All methods are called by one thread, the server's; `link.py` is the other side.

    Attributes:
        serving: Number of the version that the engine serves.
        is_attended: The replica has polled, and the coordinator has not withdrawn since.
        is_draining: It takes no more versions.
    """

    def __init__(
        self, staging: StagingArea, coordinator: CoordinatorSession, clock: Clock, counters: Counter[str]
    ) -> None:
        self._staging = staging
        self._coordinator = coordinator
        self._clock = clock
        self._counters = counters
        self.serving = UNLOADED
        self.is_attended = self.is_draining = False
        self._pin = Pin()
        self._incarnation, self._newest_started_ns = "", 0
        self._heard = ReportLog()
        self._parked: _Parked | None = None

    @property
    def is_pinned(self) -> bool:
        return self._pin.is_held

    @property
    def poll_ends_at(self) -> float:
        """When the replica's poll is over, never without one."""
        return self._parked.until if self._parked is not None else math.inf

    def add_operations(self, ops: Operations) -> None:
        """Have `ops` take the replica's calls."""
        self._add(ops, wire.NEXT_STAGED, self._take_poll)
        self._add(ops, wire.LOADED, self._take_loaded)
        self._add(ops, wire.PIN, lambda _, asked: self._set_pin(asked, is_held=True))
        self._add(ops, wire.UNPIN, lambda _, asked: self._set_pin(asked, is_held=False))
        self._add(ops, wire.DRAIN, lambda _, __: self.drain())

    def lose_direct_copies(self) -> None:
        """The engine's workers have lost what they held; the coordinator is to send it anew."""
        for number in self._staging.drop_direct():
            self._coordinator.report(told.Lost(number))

    def drain(self) -> wire.Handed:
        """Accept no more offers."""
        if not self.is_draining:
            self.is_draining = True
            self._coordinator.report(told.Draining())
        return wire.Handed(fenced=self._coordinator.is_fenced)

    def answer_poll(self) -> None:
        """Hand the replica the copy that it is to load, if it waits for one and there is one."""
        if self._parked is None or self._pin.is_held:
            return
        copy = self._staging.take(self.serving)
        if copy is not None:
            fault_point("receiver.hand_over", copy.number)
            self._end_poll(copy)

    def end_overdue_poll(self) -> None:
        """Answer a poll that has waited for long enough: there is nothing to load."""
        if self._parked is not None and self._clock.now() >= self._parked.until:
            self._end_poll(None)

    def _add(
        self,
        ops: Operations,
        operation: Operation[R, wire.Handed],
        do: Callable[[Request, R], wire.Handed | None],
    ) -> None:
        """Register `do`; late calls, and those of a superseded process of the replica, do not reach it."""
        channel = "pins" if operation.name in PINS else "polls"

        def hear(request: Request, asked: R) -> wire.Handed | None:
            if self._is_superseded(asked):
                self._counters["past_calls"] += 1
                return wire.Handed(fenced=True, past=True)
            if self._is_late(asked, channel):
                self._counters["late_calls"] += 1
                return wire.Handed(fenced=self._coordinator.is_fenced)
            return do(request, asked)

        ops.add(operation, hear)

    def _is_superseded(self, asked: wire.OfReplica) -> bool:
        """Tell whether the caller is an older process of the replica than one that has called."""
        self._newest_started_ns = max(self._newest_started_ns, asked.started_ns)
        return 0 < asked.started_ns < self._newest_started_ns

    def _is_late(self, asked: wire.OfReplica, channel: str) -> bool:
        """Tell whether the replica has made a newer call: the state that this one tells of is out of date."""
        return asked.seq is not None and not self._heard.is_new(channel, asked.incarnation, asked.seq)

    def _take_poll(self, request: Request, asked: wire.NextStaged) -> None:
        if self._parked is not None:
            self._end_poll(None)  # the replica asks anew; it no longer waits for the older answer
        self._note_process(asked.incarnation)
        self._note_serving(asked.serving)
        if not self.is_attended:
            self.is_attended = True
            self._coordinator.report(told.Attended())
        self._parked = _Parked(request, self._clock.now() + asked.wait_s)

    def _note_process(self, incarnation: str) -> None:
        self._note_pin(self._pin.meet(incarnation))
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._staging.quarantine()
            self.lose_direct_copies()

    def _note_serving(self, serving: int) -> None:
        if serving < self.serving:
            self._counters["replica_restarts"] += 1
            self.serving = serving
            self._staging.release_copies()
            self._note_pin(self._pin.end())
            self._coordinator.report(told.Restarted(serving))
            self.lose_direct_copies()
        elif serving > self.serving:
            self.serving = serving
            self._staging.finish_load(serving, is_ok=True)
            self._coordinator.report(told.LoadEnded(serving, ok=True, error=""))

    def _take_loaded(self, request: Request, asked: wire.Loaded) -> wire.Handed:
        number, is_ok, error = asked.number, asked.ok, asked.error[: wire.MAX_ERROR_CHARACTERS]
        self._staging.finish_load(number, is_ok)
        self.serving = number if is_ok else UNLOADED
        self._counters["loads" if is_ok else "failed_loads"] += 1
        self._coordinator.report(told.LoadEnded(number, is_ok, error))
        if not is_ok:
            self.lose_direct_copies()
        return wire.Handed(fenced=self._coordinator.is_fenced)

    def _set_pin(self, asked: wire.OfReplica, *, is_held: bool) -> wire.Handed:
        self._note_pin(self._pin.set(asked.incarnation, is_held))
        return wire.Handed(fenced=self._coordinator.is_fenced)

    def _note_pin(self, has_changed: bool) -> None:
        if not has_changed:
            return
        if self._pin.is_held:
            self._staging.withdraw()  # as the coordinator does, which commits again after the unpin
        self._coordinator.report(told.Pinned() if self._pin.is_held else told.Unpinned())

    def _end_poll(self, copy: Copy | None) -> None:
        assert self._parked is not None
        request, self._parked = self._parked.request, None
        handed = wire.Handed(copy.path if copy is not None else "", self._coordinator.is_fenced)
        send_answer(request, Answer(handed, [copy.manifest.to_bytes()] if copy is not None else []))
