"""Part of a vLLM worker in direct transfers: records one load, then receives what that load has read.

Owns the worker's stages and its seat. Invariant: no seat is taken before it is known what the worker reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from vllm.distributed.parallel_state import get_world_group

from asyncrl.core.errors import SyncError
from asyncrl.core.runtime.threads import ThreadRuntime
from weight_sync.direct.seat import DeskAddress, Seat
from weight_sync.direct.stage import Stages, find_room
from weight_sync.direct.transports.choice import HOST
from weight_sync.rectangles.recorder import ReadRecorder

log = logging.getLogger(__name__)


class WorkerSeat:
    """See the module. The seat lasts as long as the worker's process, and moves with the desk.

    Attributes:
        stages: Of the versions that the worker has received itself.
    """

    def __init__(self) -> None:
        self._runtime = ThreadRuntime()
        self.stages = Stages([], self._runtime)
        self._desk: DeskAddress | None = None
        self._seat: Seat | None = None

    @contextmanager
    def taken_after(
        self,
        desk: DeskAddress | None,
        tensors: Iterable[tuple[str, torch.Tensor]],
        device: torch.device = HOST,
    ) -> Iterator[None]:
        """Take a seat at `desk` once the block has loaded; its load of `tensors` is recorded if none was.

        Args:
            device: Of the model. Later versions arrive there if there is room, else in host memory.
        """
        if desk is None or desk == self._desk:
            yield
            return
        if self.stages.regions:
            yield
        else:
            with ReadRecorder(tensors) as recorder:
                yield
            self._desk = desk
            try:
                self.stages = Stages(recorder.regions, self._runtime)
                self.stages.device = find_room(device, recorder.regions, tensors)
            except SyncError as error:
                log.warning("this worker receives nothing directly: %s", error)
                return
        self._take(desk)

    def _take(self, desk: DeskAddress) -> None:
        self.leave()
        group = get_world_group()
        self._seat = Seat(self._runtime, desk, group.rank, group.world_size, self.stages)
        self._seat.start()
        self._desk = desk

    def leave(self) -> None:
        """Give the seat up, if there is one."""
        if self._seat is not None:
            self._seat.close()
            self._seat = None
