"""Members of direct transfers that each pretend to have a GPU, and meet over the stand-in for NCCL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tests.pretended_gpu.device.nccl import take_gpu
from tests.pretended_gpu.device.tensors import GPU, PretendedGpu, to_gpu
from tests.weight_sync.direct.members import (
    RUNTIME,
    Members,
    ScriptedSink,
    make_checkpoint,
    parts_at,
    random_regions,
)
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.party import Party
from weight_sync.direct.snapshot import Snapshots

NUM_SOURCES, MAX_BYTES = 4, 8192
"""Learner ranks with TP2 and PP2; of a pack."""


class GpuMembers(Members):
    """Members on a GPU each, but those of `shared` on one.

    Args:
        shared: Ranks.
    """

    def __init__(
        self, parties: Sequence[Party], *, is_tagged: bool = False, shared: Collection[int] = ()
    ) -> None:
        super().__init__(parties, NUM_SOURCES, is_tagged=is_tagged, max_bytes=MAX_BYTES)
        self._shared = shared

    def _work(self, order: SeatOrder, rank: int, until: float) -> int:
        take_gpu("shared" if rank in self._shared else f"gpu-{rank}")
        with PretendedGpu():
            return super()._work(order, rank, until)


def take_on_gpu(source: Snapshots, number: int, rank: int, dtype: str = "float32") -> bool:
    parts = [
        replace(part, values_RC=to_gpu(part.values_RC.contiguous().clone()))
        for part in parts_at(number, rank)
    ]
    with PretendedGpu():
        return source.take(number, parts, dict.fromkeys(make_checkpoint(number), dtype))


def make_gpu_parties(seeds: Sequence[int], dtype: str = "float32") -> tuple[list[Party], list[ScriptedSink]]:
    """Return learner ranks with version 1 on their GPUs and a sink for each seed, and again the sinks."""
    sources = [Snapshots(RUNTIME) for _ in range(NUM_SOURCES)]
    for rank, source in enumerate(sources):
        assert take_on_gpu(source, 1, rank, dtype)
    sinks = [ScriptedSink(random_regions(seed), GPU) for seed in seeds]
    return [*sources, *sinks], sinks
