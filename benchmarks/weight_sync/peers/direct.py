"""Both ends of the direct path: a learner that keeps snapshots, and replicas in processes of their own.

Each replica has one seat, wants every tensor whole, and loads by copying into memory of its own.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from asyncrl.core.runtime.faults import VARIABLE
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service import ServiceContext
from benchmarks.weight_sync.peers.peers import now_s, obey
from benchmarks.weight_sync.peers.services import LEARNER_ACTS, PUBLISHER_NAME, CopyingReplica, Learner
from weight_sync.direct.seat import DeskAddress, Seat
from weight_sync.direct.snapshot import Snapshots
from weight_sync.direct.stage import Stages
from weight_sync.memory.parts import Part
from weight_sync.memory.staging import Staged
from weight_sync.rectangles.rectangle import Rectangle


class TimedParty:
    """A party that notes the seconds of its last transfer: begin, end, packing, the process's own time."""

    def __init__(self, party: Any) -> None:
        self._party = party
        self._store: Any = None
        self.began_s = self.ended_s = self.pack_s = self.cpu_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store if name == "base" else self._party, name)

    def open(self, *args: Any) -> TimedParty:
        """As the party's; this is the store, too."""
        self._store = self._party.open(*args)
        self.began_s, self.pack_s, self.cpu_s = now_s(), 0.0, -time.process_time()
        return self

    def pack(self, index: int) -> Any:
        """As the store's."""
        began = now_s()
        found = self._store.pack(index)
        self.pack_s += now_s() - began
        return found

    def close(self, is_whole: bool) -> None:
        """As the store's."""
        self._store.close(is_whole)
        self.ended_s = now_s()
        self.cpu_s += time.process_time()

    def times(self) -> dict[str, float]:
        """Return the seconds of the last transfer."""
        names = ("began_s", "ended_s", "pack_s", "cpu_s")
        return {name: getattr(self, name) for name in names}


class SendingLearner(Learner):
    """A learner of one rank that sends its snapshots itself."""

    def __init__(self, context: ServiceContext, source: int) -> None:
        super().__init__(context, source)
        self._parts = [
            Part(name, tuple(tensor.shape), 0, 0, tensor.reshape(len(tensor), -1))
            for name, tensor in self._weights
        ]
        self._dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._weights}
        self._snapshots = Snapshots(ThreadRuntime())
        desk = DeskAddress(context.addresses[PUBLISHER_NAME], context.client_keys)
        self._timed: Any = TimedParty(self._snapshots)
        self._seat = Seat(ThreadRuntime(), desk, 0, 1, self._timed)
        self._snapshot_s = 0.0

    def publish(self, number: int) -> tuple[float, float]:
        """Keep a snapshot, and hand over as any learner does."""
        began, is_first = now_s(), not self._snapshots.dtypes
        self._snapshots.take(number, self._parts, self._dtypes)
        self._snapshot_s = now_s() - began
        if is_first:
            self._seat.start()
        return began, super().publish(number)[1]

    def parts(self) -> dict[str, float]:
        """Return the seconds of the last publish, by part."""
        return {"snapshot_s": self._snapshot_s, **super().parts()}

    def carried(self) -> dict[str, float]:
        """Return the seconds of the last transfer that was sent."""
        times: dict[str, float] = self._timed.times()
        return times

    def fail_at(self, fault: str) -> None:
        """Be killed at a fault point."""
        os.environ[VARIABLE] = fault


class DirectReplica(CopyingReplica):
    """Takes its seat after the first version, which comes staged."""

    def __init__(self, receiver: str, context: ServiceContext) -> None:
        self._stages: Stages | None = None
        self.timed: Any = None
        self._desk = DeskAddress(receiver, context.client_keys)
        self.is_direct = ThreadEvent()
        super().__init__(receiver, context)

    def _load(self, staged: Staged) -> None:
        if self._stages is None:
            regions = [(entry.name, Rectangle.whole(entry.shape)) for entry in staged.manifest.tensors]
            self._stages = Stages(regions, ThreadRuntime())
            self.timed = TimedParty(self._stages)
            Seat(ThreadRuntime(), self._desk, 0, 1, self.timed).start()
        if staged.path:
            super()._load(staged)
            return
        self.is_direct.set()
        self._copy(self._stages.tensors(staged.version.number, staged.manifest.layout))


def run_learner(pipe: Connection, context: ServiceContext, source: int) -> None:
    """Entry of the learner's process."""
    learner = SendingLearner(context, source)
    acts = (*LEARNER_ACTS, "carried", "fail_at")
    obey(pipe, {name: getattr(learner, name) for name in acts})


def run_replica(pipe: Connection, context: ServiceContext, receiver: str) -> None:
    """Entry of a replica's process; `is_direct` tells whether a version has come directly yet."""
    replica = DirectReplica(context.addresses[receiver], context)
    obey(pipe, {"is_direct": replica.is_direct.is_set, "carried": lambda: replica.timed.times()})
