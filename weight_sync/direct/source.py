"""A learner rank's side of direct transfers: its snapshots, and the seat that sends them."""

from __future__ import annotations

import json

from asyncrl.core.runtime.interface import Runtime
from weight_sync.direct.seat import DeskAddress, Seat
from weight_sync.direct.snapshot import Snapshots
from weight_sync.memory.manifest import Layout
from weight_sync.memory.sharded_publish import Collectives
from weight_sync.publisher_client import Exporter


class DirectSource:
    """See the module. `take` is collective; the seat asks for orders once there is something to send.

    Args:
        keeps_sent: As of `Snapshots`.
    """

    def __init__(
        self, runtime: Runtime, desk: DeskAddress, collectives: Collectives, *, keeps_sent: bool = False
    ) -> None:
        self._snapshots, self._collectives = Snapshots(runtime, keeps_sent=keeps_sent), collectives
        self._seat = Seat(runtime, desk, collectives.rank, collectives.world_size, self._snapshots)
        self._dtypes: dict[str, str] = {}
        self._has_started = False

    def take(self, number: int, path: str, layout: Layout | None, model: Exporter) -> None:
        """Take a snapshot of the version that is published next, but of the first of a start. Collective.

        Args:
            path: As in `publish_sharded`.
            layout: Of the versions before; rank 0 alone knows it.
        """
        if not self._dtypes and path:
            told = {entry.name: entry.dtype for entry in layout.tensors} if layout is not None else {}
            shared = self._collectives.share_bytes(json.dumps(told).encode() if told else None)
            self._dtypes = json.loads(shared)
        if self._dtypes:
            self._snapshots.take(number, model.named_parts(), self._dtypes)
            if not self._has_started:
                self._has_started = True
                self._seat.start()

    def close(self) -> None:
        """Give up what is being sent."""
        self._seat.close()
