"""A vLLM worker whose stages a test fills: from the file of a version, by parcels, as learner ranks do."""

from __future__ import annotations

from dataclasses import astuple

from rollout_service.engine.vllm.weight_transfer import LoadReporter
from tests.weight_sync.direct.engine.test_stage import poisoned
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.parts import Part
from weight_sync.memory.staging import Staged, open_tensors
from weight_sync.rectangles.packs import Parameters, make_packs, place_parts
from weight_sync.rectangles.parcels import plan_parcels

MAX_BYTES = 4096
NUM_SOURCES = 2


class FilledStages(LoadReporter):
    """See the module; mixed into vLLM's workers in place of `LoadReporter`."""

    def fill_stage(self, path: str, manifest_bytes: bytes) -> int:
        """Bring a version to this worker from two holders of half of the rows each; return its bytes.

        All that does not come is NaN.
        """
        manifest, stages = Manifest.from_bytes(manifest_bytes), self.weight_transfer_engine._seat.stages
        stages._empty = poisoned
        tensors = dict(open_tensors(Staged(manifest.version, path, manifest)))
        sources = []
        for index in range(NUM_SOURCES):
            parts = []
            for name, tensor in tensors.items():
                all_RC = tensor.view(len(tensor), -1)
                first, last = (len(tensor) * edge // NUM_SOURCES for edge in (index, index + 1))
                parts.append(Part(name, tuple(tensor.shape), first, 0, all_RC[first:last]))
            sources.append(place_parts(parts))
        held = [[(place.tensor, place.rectangle) for place in places] for places, _ in sources]
        sizes = {name: tensor.itemsize for name, tensor in tensors.items()}
        packs = make_packs(plan_parcels(held, [stages.regions], sizes, max_bytes=MAX_BYTES), MAX_BYTES)
        store = stages.open(manifest.version.number, packs, until=0.0)
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        for index, pack in enumerate(packs):
            Parameters(*sources[pack.source], dtypes).read(pack, store.pack(index))
        store.close(is_whole=True)
        return sum(pack.num_bytes for pack in packs)

    def describe_seat(self) -> list[object] | None:
        """Return the desk, its keys and the seat's index and count."""
        seat = self.weight_transfer_engine._seat
        if seat._desk is None or seat._seat is None:
            return None
        assert seat._desk.keys is not None
        return [seat._desk.address, *astuple(seat._desk.keys), seat._seat._index, seat._seat._count]
