"""Bytes of weights on their way: a played transport (`weight_sync.backends.contract`).

Owns what a broadcast over a process group does to its members: it begins when all have met, stands still
while one of them does or is cut off, fails for all soon after one left or died, and ends for each at its
deadline.
Invariant: bytes arrive as rank 0 had them when it sent them, unless they are garbled on purpose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.core.errors import DeadlineExceeded, SyncError
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import Process, Waiters, World
from weight_sync.backends.contract import Group
from weight_sync.protocol.state import ID_BITS

NOTICE_S = 0.05
STUCK_LOOK_S = 0.1
LATE_SHARE, LATE_S = 0.5, 0.4
"""Share of members that are still written to after they gave up, and for how long at most."""


class Exchange:
    """A group of one membership: who has met, and what rank 0 has sent with the time when it is there."""

    def __init__(self, world: World) -> None:
        self.members: dict[int, Process] = {}
        self.sent: list[tuple[bytes, float]] = []
        self.is_broken = False
        self.changed = Waiters(world)

    def fail(self) -> None:
        """Break it for all."""
        self.is_broken = True
        self.changed.wake()


class Carriage:
    """All groups of a world.

    Attributes:
        bytes_per_s: How fast a group's bytes travel.
        garbled: By name of a receiver, the share of its buckets in which a bit flips.
        faults: Sentences on memberships that two groups had, or that an older coordinator ordered.
    """

    def __init__(self, world: World, wires: Wires, bytes_per_s: float) -> None:
        self.world, self.wires, self.bytes_per_s = world, wires, bytes_per_s
        self.garbled: dict[str, float] = {}
        self.faults: list[str] = []
        self._tokens: dict[Process, int] = {}
        self._exchanges: dict[tuple[int, int], Exchange] = {}
        world.on_kill.append(self._hear_end)

    def transports(self, runtime: SimRuntime) -> Callable[[Group], SimTransport]:
        """Return the maker of a process's transports."""
        return lambda _: SimTransport(self, runtime)

    def meet(self, group: Group, process: Process) -> Exchange:
        """Return the group's exchange, which the process is a member of from now on."""
        key = (group.store_port, group.membership)
        exchange = self._exchanges.get(key)
        if exchange is None:
            exchange = self._exchanges[key] = Exchange(self.world)
        before = exchange.members.get(group.rank)
        if before is not None and before is not process:
            self.faults.append(f"membership {group.membership}, rank {group.rank}: {before}, {process}")
        token = group.membership >> ID_BITS
        if token < self._tokens.get(process, 0):
            self.faults.append(f"{process} joins a group of an older coordinator")
        self._tokens[process] = max(token, self._tokens.get(process, 0))
        exchange.members[group.rank] = process
        exchange.changed.wake()
        return exchange

    def is_moving(self, exchange: Exchange) -> bool:
        """Tell whether bytes pass between all members now."""
        members = list(exchange.members.values())
        sender = exchange.members.get(0, members[0])
        return all(not one.is_frozen and self.wires.can_reach(sender, one) for one in members)

    def garble(self, process: Process, data: bytes) -> bytes:
        """Return what arrives of a bucket."""
        dice = self.world.dice
        if data and dice.random() < self.garbled.get(process.name, 0.0):
            at = dice.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]
        return data

    def _hear_end(self, process: Process) -> None:
        for exchange in self._exchanges.values():
            if process in exchange.members.values() and not exchange.is_broken:
                self.world.after(NOTICE_S, exchange.fail)


class SimTransport:
    """One member's side of a group."""

    def __init__(self, carriage: Carriage, runtime: SimRuntime) -> None:
        self.carriage, self.runtime, self.world = carriage, runtime, carriage.world
        self._exchange: Exchange | None = None
        self._is_aborted = False
        self.rank, self._num_started = -1, 0

    @property
    def exchange(self) -> Exchange:
        """The group that it has joined."""
        assert self._exchange is not None, "a transport is formed first"
        return self._exchange

    def form(self, group: Group, until: float) -> None:
        """Meet the other members."""
        if self._is_aborted:
            raise SyncError("the transport was aborted")
        self.rank = group.rank
        exchange = self._exchange = self.carriage.meet(group, self.runtime.process)
        self.wait_until(lambda: len(exchange.members) == group.world, until)

    def wait_until(self, is_there: Callable[[], bool], until: float) -> None:
        """Wait for something of the group, at most until then by the process's clock."""
        exchange = self.exchange
        while True:
            if exchange.is_broken or self._is_aborted:
                raise SyncError("a member left the group")
            if is_there():
                return
            left_s = until - self.runtime.now()
            if left_s <= 0.0:
                exchange.fail()
                raise DeadlineExceeded("the group was not done in time")
            self.world.block(left_s, exchange.changed)

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> SimBroadcast:
        """Start to send or receive a bucket."""
        exchange = self.exchange
        if exchange.is_broken or self._is_aborted:
            raise SyncError("the group is broken")
        if self.rank == 0:
            begins = max(exchange.sent[-1][1] if exchange.sent else 0.0, self.world.now)
            exchange.sent.append(
                (bucket.numpy().tobytes(), begins + bucket.numel() / self.carriage.bytes_per_s)
            )
            exchange.changed.wake()
        self._num_started += 1
        return SimBroadcast(self, self._num_started - 1, bucket, until)

    def broadcast(self, bucket: torch.Tensor, until: float, name: str = "") -> None:
        """Send or receive a bucket."""
        self.start(bucket, until).wait()

    def abort(self) -> None:
        """Leave: the group breaks for all."""
        self._is_aborted = True
        if self._exchange is not None:
            self._exchange.fail()

    close = abort


class SimBroadcast:
    """A broadcast under way."""

    def __init__(self, transport: SimTransport, index: int, bucket: torch.Tensor, until: float) -> None:
        self._transport, self._index, self._bucket, self._until = transport, index, bucket, until

    def wait(self) -> None:
        """Wait until the bucket is there; while a member stands still, nothing moves.

        Who gave up may be written to a moment longer: what runs in a collective cannot be taken back.
        """
        try:
            data = self._wait()
        except SyncError:
            self._write_late()
            raise
        if self._transport.rank != 0:
            self._bucket.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _write_late(self) -> None:
        transport, world = self._transport, self._transport.world
        sent = transport.exchange.sent
        if transport.rank == 0 or len(sent) <= self._index or world.dice.random() > LATE_SHARE:
            return
        world.block(world.dice.random() * LATE_S)
        data = sent[self._index][0][: self._bucket.numel() // 2]
        if data:
            self._bucket[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _wait(self) -> bytes:
        transport, exchange = self._transport, self._transport.exchange
        world, carriage = transport.world, transport.carriage
        transport.wait_until(lambda: len(exchange.sent) > self._index, self._until)
        data, at = exchange.sent[self._index]
        while world.now < at or not carriage.is_moving(exchange):
            left_s = max(at - world.now, 0.0) or STUCK_LOOK_S
            world.block(min(left_s, max(0.0, self._until - transport.runtime.now())), exchange.changed)
            transport.wait_until(lambda: True, self._until)
            if transport.runtime.now() >= self._until:
                exchange.fail()
        if transport.rank == 0:
            return data
        data = carriage.garble(transport.runtime.process, data)
        if len(data) != self._bucket.numel():
            exchange.fail()
            raise SyncError(f"{len(data)} bytes came for a bucket of {self._bucket.numel()}")
        return data
