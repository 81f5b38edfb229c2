"""Both ends of the direct path: a learner that keeps snapshots, and replicas in processes of their own.

Each replica has one seat, wants every tensor whole, and loads by copying into memory of its own.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service import ServiceContext
from benchmarks.weight_sync.peers.peers import obey
from benchmarks.weight_sync.peers.services import PUBLISHER_NAME, CopyingReplica, Learner
from weight_sync.direct.seat import DeskAddress, Seat
from weight_sync.direct.snapshot import Snapshots
from weight_sync.direct.stage import Stages
from weight_sync.memory.parts import Part
from weight_sync.memory.staging import Staged
from weight_sync.rectangles.rectangle import Rectangle


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
        self._seat = Seat(ThreadRuntime(), desk, 0, 1, self._snapshots)

    def publish(self, number: int) -> tuple[float, float]:
        """Keep a snapshot, and hand over as any learner does."""
        is_first = not self._snapshots.dtypes
        self._snapshots.take(number, self._parts, self._dtypes)
        if is_first:
            self._seat.start()
        return super().publish(number)


class DirectReplica(CopyingReplica):
    """Takes its seat after the first version, which comes staged."""

    def __init__(self, receiver: str, context: ServiceContext) -> None:
        self._stages: Stages | None = None
        self._desk = DeskAddress(receiver, context.client_keys)
        self.is_direct = ThreadEvent()
        super().__init__(receiver, context)

    def _load(self, staged: Staged) -> None:
        if self._stages is None:
            regions = [(entry.name, Rectangle.whole(entry.shape)) for entry in staged.manifest.tensors]
            self._stages = Stages(regions, ThreadRuntime())
            Seat(ThreadRuntime(), self._desk, 0, 1, self._stages).start()
        if staged.path:
            super()._load(staged)
            return
        self.is_direct.set()
        self._copy(self._stages.tensors(staged.version.number, staged.manifest.layout))


def run_learner(pipe: Connection, context: ServiceContext, source: int) -> None:
    """Entry of the learner's process."""
    learner = SendingLearner(context, source)
    obey(pipe, {name: getattr(learner, name) for name in ("publish", "copy", "steps", "num_bytes")})


def run_replica(pipe: Connection, context: ServiceContext, receiver: str) -> None:
    """Entry of a replica's process; `is_direct` tells whether a version has come directly yet."""
    replica = DirectReplica(context.addresses[receiver], context)
    obey(pipe, {"is_direct": replica.is_direct.is_set})
