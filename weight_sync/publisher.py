"""The publisher service, beside the learner's rank 0: keeps the newest version and sends it.

Owns the segments, the store where groups meet, and the sending side of each group. Never makes the
learner wait for a replica: a commit ends as soon as the version is current.
The server's thread
  consumes: the learner's calls, orders, ends of transfers   waits for: a request or a tick
  unblocked by: the same, through the inbox                  produces: `published`, `sent`, `send_failed`
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from asyncrl.clock import Clock
from asyncrl.errors import WireError
from asyncrl.faults import fault_point
from asyncrl.keys import RunKeys
from asyncrl.rpc import Request, Server
from asyncrl.wire import field
from weight_sync.backends.contract import Transport
from weight_sync.carrier import TRANSPORT, Carrier, TransferOrder
from weight_sync.inbox import WAKE, Inbox
from weight_sync.liaison import Introduction, Liaison
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.pool import SegmentPool, Slot
from weight_sync.protocol.protocol import PUBLISHER

log = logging.getLogger(__name__)

SUPERSEDED = "superseded"


@dataclass(frozen=True)
class Endpoint:
    """Where receivers meet the publisher, and by which backends."""

    store_host: str
    store_port: int
    abilities: tuple[str, ...]


class PublisherService:
    """See the module.

    Args:
        coordinator_address: RPC address of the coordinator.
        incarnation: Unique per process.
        pool: The segments; closed with the service.
        endpoint: Told to the coordinator.
        make_transport: Makes a transport of the named backend.
    """

    def __init__(
        self,
        coordinator_address: str,
        incarnation: str,
        pool: SegmentPool,
        endpoint: Endpoint,
        make_transport: Callable[[str], Transport],
        clock: Clock,
        bind: str = "tcp://127.0.0.1:*",
        keys: RunKeys | None = None,
    ) -> None:
        self._server = Server(bind, keys.server if keys else None)
        client_keys = keys.client if keys else None
        self._inbox = Inbox(self._server.address, client_keys)
        self._pool = pool
        self._endpoint = endpoint
        self._carrier = Carrier(clock, make_transport)
        self._liaison = Liaison(
            coordinator_address, PUBLISHER, incarnation, self._introduce, self._deliver, client_keys
        )
        self._sending: dict[int, TransferOrder] = {}
        self._current: Manifest | None = None
        self.counters: Counter[str] = Counter()
        self._snapshot: dict[str, Any] = {"state": "STARTING", "address": self._server.address}

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop`, then unlink the segments."""
        self._liaison.start()
        try:
            self._server.serve(self, stop)
        finally:
            self._liaison.stop()
            self._inbox.close()
            self._carrier.close()
            self._pool.close()

    def status(self) -> dict[str, Any]:
        """Return the current version, the slots' states and the counters."""
        return self._snapshot

    def command(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Nothing can be asked of the publisher but to stop."""
        return {}

    def handle(self, request: Request) -> None:
        """Answer the learner; see `handoff.py` for the other side."""
        args = request.args
        if request.op == WAKE:
            self._inbox.drain()
            request.reply()
        elif request.op == "open":
            self._pool.open(field(args, "token", int))
            request.reply()
        elif request.op == "acquire":
            request.reply(path=self._acquire(field(args, "token", int), field(args, "num_bytes", int)))
        elif request.op == "commit":
            self._commit(request)
        elif request.op == "status":
            request.reply(**self._snapshot)
        else:
            raise WireError(f"the publisher knows no '{request.op}'")

    def tick(self, now: float) -> None:
        """Run what the inbox holds and renew the status."""
        self._inbox.drain()
        current = self._current.version if self._current else None
        self._snapshot = {
            "state": "RUNNING",
            "address": self._server.address,
            "version": [current.number, current.step] if current else None,
            "segments": self._pool.describe(),
            "counters": dict(self.counters + self._liaison.counters),
        }

    def _acquire(self, token: int, num_bytes: int) -> str:
        path = self._pool.acquire(token, num_bytes)
        self.counters["deferred" if path is None else "acquired"] += 1
        return path or ""

    def _commit(self, request: Request) -> None:
        if not request.frames:
            raise WireError("a commit without a manifest")
        data = bytes(request.frames[0])
        manifest = Manifest.from_bytes(data)
        fault_point("publisher.commit", manifest.version.number)
        self._pool.commit(field(request.args, "token", int), field(request.args, "path", str), manifest)
        if manifest != self._current:
            self._current = manifest
            self._liaison.report("published", [data])
            self.counters["published"] += 1
        request.reply()

    def _introduce(self) -> Introduction:
        current = self._current
        args = {
            "store_host": self._endpoint.store_host,
            "store_port": self._endpoint.store_port,
            "abilities": list(self._endpoint.abilities),
        }
        return Introduction(args, [current.to_bytes()] if current else [])

    def _deliver(self, kind: str, fields: dict[str, Any], manifest: bytes) -> None:
        self._inbox.put(partial(self._obey, kind, fields))

    def _obey(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "transfer":
            self._send(TransferOrder.parse(fields))
        elif kind == "abort":
            self._abort(field(fields, "round", int))
        else:
            log.warning("the order '%s' means nothing to the publisher", kind)
            self.counters["unknown_orders"] += 1

    def _send(self, order: TransferOrder) -> None:
        if order.round in self._sending:
            return  # the same order again
        slot = self._pool.hold(order.number)
        if slot is None or slot.manifest is None or slot.bytes_B is None:
            self.counters[SUPERSEDED] += 1
            self._liaison.report("send_failed", round=order.round, cause=SUPERSEDED)
            return
        self._sending[order.round] = order
        done = partial(self._put_end, slot)
        self._carrier.carry(order, cut(slot.bytes_B, slot.manifest), _count_bucket(order.number), done)

    def _abort(self, round_id: int) -> None:
        order = self._sending.pop(round_id, None)
        if order is not None:  # the thread ends by itself and releases the slot then
            self._carrier.abort(order.group.membership)

    def _put_end(self, slot: Slot, order: TransferOrder, cause: str, message: str) -> None:
        self._inbox.put(partial(self._end, slot, order, cause, message))

    def _end(self, slot: Slot, order: TransferOrder, cause: str, message: str) -> None:
        self._pool.release(slot)
        self._sending.pop(order.round, None)
        if cause:
            self.counters["failed_transfers"] += 1
            log.warning("round %d with version %d failed: %s", order.round, order.number, message)
            self._carrier.abort(order.group.membership)
            self._liaison.report("send_failed", round=order.round, cause=TRANSPORT)
        else:
            assert slot.manifest is not None
            self._liaison.report("sent", round=order.round, num_bytes=slot.manifest.total_bytes)


def cut(bytes_B: torch.Tensor, manifest: Manifest) -> list[torch.Tensor]:
    """Return the buckets as slices of the whole address space."""
    ranges = [manifest.bucket_range(index) for index in range(len(manifest.buckets))]
    return [bytes_B[start:end] for start, end in ranges]


def _count_bucket(number: int) -> Callable[[int, torch.Tensor], None]:
    def after_bucket(index: int, bucket: torch.Tensor) -> None:
        fault_point("publisher.bucket", number)

    return after_bucket
