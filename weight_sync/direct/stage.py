"""Stages of an engine worker: packs of versions as they were received, and the tensors that its loader reads.

A stage has the bytes of the rectangles that the worker wants, each pack in a place of its own. The tensors of
a load are made of it one at a time, in full shape: memory for rows that nobody reads is never touched.
Invariant: only what came whole can be loaded.
"""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

import torch

from asyncrl.core.errors import SyncError
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.staleness import UNLOADED
from weight_sync.direct.transports.choice import HOST
from weight_sync.encoding.delta_codec import ELEMENTS
from weight_sync.memory.manifest import Layout, TensorEntry, align
from weight_sync.rectangles.packs import Pack, Parameters, view_parcel
from weight_sync.rectangles.parcels import Parcel, Region
from weight_sync.rectangles.rectangle import Placement, Rectangle

Empty = Callable[..., torch.Tensor]
"""`torch.empty`, or what fills its result too."""


NUM_STAGES = 2
"""Of a worker: one is loaded while the next one comes."""
SPARE_BYTES = 1 << 30
"""Of a GPU, left to the engine and the library."""

log = logging.getLogger(__name__)


def find_room(
    device: torch.device, regions: Iterable[Region], tensors: Iterable[tuple[str, torch.Tensor]]
) -> torch.device:
    """Return `device` if it is a GPU with room for stages of `regions` and one full tensor, else the host."""
    if device.type != "cuda":
        return HOST
    sizes = {name: (tensor.itemsize, tensor.nbytes) for name, tensor in tensors}
    stage_bytes = sum(rectangle.num_elements * sizes[name][0] for name, rectangle in regions)
    needed = NUM_STAGES * stage_bytes + max(whole for _, whole in sizes.values()) + SPARE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    if free >= needed:
        return device
    log.info("new weights arrive in host memory: the GPU has %.3g GB free of %.3g", free / 1e9, needed / 1e9)
    return HOST


class Stages:
    """The `Party` of an engine worker. Any thread may call it.

    Args:
        regions: What the worker's loader reads of every version.
        empty: Makes memory, on the device that it is given, or in host memory.

    Attributes:
        device: Where packs are to arrive.

    >>> # with ReadRecorder(tensors) as recorder: model.load_weights(tensors)
    >>> # stages = Stages(recorder.regions, runtime)
    >>> # store = stages.open(7, packs, until)      # in the seat's thread, which fills each store.pack(i)
    >>> # store.close(is_whole=True)
    >>> # model.load_weights(stages.tensors(7, manifest.layout))
    """

    def __init__(self, regions: Sequence[Region], runtime: Runtime, empty: Empty = torch.empty) -> None:
        self.regions, self.dtypes = regions, dict[str, str]()
        self.device = HOST
        self._empty = empty
        self._lock = runtime.lock()
        self._blocks = _Blocks(empty)
        self._whole: dict[int, Stage] = {}
        self._kept: Collection[int] = ()

    def keep(self, numbers: Collection[int]) -> None:
        """Name the versions that may still be loaded: all others are freed when there is a next one."""
        with self._lock:
            self._kept = frozenset(numbers)

    def open(
        self,
        number: int,
        packs: Sequence[Pack],
        until: float,
        base: int = UNLOADED,
        device: torch.device = HOST,
    ) -> Stage:
        """Return room for the packs of a version; it can be loaded once that is closed as whole."""
        with self._lock:
            old, kept = self._whole.get(base), {*self._kept, base} - {number}
            self._whole = {one: stage for one, stage in self._whole.items() if one in kept}
            empty = self._empty if device == HOST else partial(self._empty, device=device)
            blocks = self._blocks if device == HOST else _DeviceBlocks(empty)
            return Stage(packs, empty, blocks, partial(self._add, number), old)

    def _add(self, number: int, stage: Stage) -> None:
        with self._lock:
            self._whole[number] = stage

    def tensors(self, number: int, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Return (name, tensor) in the order of the layout, each made when it is asked for.

        Elements outside of `regions` have no meaning. The loader must not write into the tensors.

        Raises:
            SyncError: This version did not come, or has been freed.
        """
        with self._lock:
            stage = self._whole.get(number)
        if stage is None:
            raise SyncError(f"version {number} is not on this worker")
        blocks = stage.make_blocks()
        return ((entry.name, stage.tensor(entry, blocks)) for entry in layout.tensors)


class Stage:
    """The packs of one version: a `PackStore`."""

    def __init__(
        self,
        packs: Sequence[Pack],
        empty: Empty,
        blocks: Blocks,
        add: Callable[[Stage], None],
        old: Stage | None = None,
    ) -> None:
        sizes = [align(pack.num_bytes) for pack in packs]
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._packs, self._empty, self._add, self._makes = packs, empty, add, type(blocks)
        self._old = old.read_elements() if old is not None else None
        self._data_B = blocks.take((self._starts[-1],), torch.uint8)
        self._parcels: dict[str, list[tuple[Parcel, int]]] = {}
        for start, pack in zip(self._starts, packs, strict=False):
            for parcel, offset in zip(pack.parcels, pack.offsets, strict=True):
                self._parcels.setdefault(parcel.tensor, []).append((parcel, start + offset))

    def pack(self, index: int) -> torch.Tensor:
        """Return the place of a pack, uint8."""
        start = self._starts[index]
        return self._data_B[start : start + self._packs[index].num_bytes]

    def base(self, index: int) -> torch.Tensor | None:
        """Fill a pack's place with what the base's stage has of it, and return it."""
        if self._old is None:
            return None
        self._old.read(self._packs[index], self.pack(index))
        return self.pack(index)

    def read_elements(self) -> Parameters:
        """Return the elements of this stage by their bits, for packs of another plan as well."""
        placements, holders, dtypes = [], {}, {}
        for tensor, parcels in self._parcels.items():
            dtypes[tensor] = ELEMENTS[parcels[0][0].item_bytes]
            for number, (parcel, at) in enumerate(parcels):
                placements.append(Placement(tensor, parcel.rectangle, f"{tensor}#{number}"))
                holders[f"{tensor}#{number}"] = view_parcel(parcel, at, self._data_B, dtypes[tensor])
        return Parameters(placements, holders, dtypes)

    def close(self, is_whole: bool) -> None:
        """End the transfer; the stage stays if all packs came."""
        self._old = None
        if is_whole:
            self._add(self)

    def make_blocks(self) -> Blocks:
        """Return memory for the tensors of a load, on the device of the stage."""
        return self._makes(self._empty)

    def tensor(self, entry: TensorEntry, blocks: Blocks) -> torch.Tensor:
        """Return a tensor in full shape, that has the values of its parcels."""
        dtype, shape = getattr(torch, entry.dtype), entry.shape
        parcels = self._parcels.get(entry.name)
        if parcels is None:
            return self._empty((), dtype=dtype).expand(shape)
        views = [(parcel.rectangle, view_parcel(parcel, at, self._data_B, dtype)) for parcel, at in parcels]
        if views[0][0] == Rectangle.whole(shape):
            return views[0][1]
        full = blocks.take(shape, dtype)
        for rectangle, values in views:
            full[rectangle.slices].copy_(values)
        return full


class _DeviceBlocks:
    """Memory of a GPU, whose allocator keeps what was freed for the next tensor."""

    def __init__(self, empty: Empty) -> None:
        self._empty = empty

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of any values."""
        return self._empty(shape, dtype=dtype)


class _Blocks:
    """Memory for tensors that are made one after another, used again once nobody refers to a former one.

    To touch new pages takes longer than the copy into them.
    """

    def __init__(self, empty: Empty) -> None:
        self._empty = empty
        self._free: list[torch.Tensor] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of any values; its memory is free when the last view of it is gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        fitting = [place for place, block in enumerate(self._free) if block.nbytes >= num_bytes]
        if fitting:
            block = self._free.pop(fitting[0])
        else:
            self._free.clear()  # too small
            block = self._empty(num_bytes, dtype=torch.uint8)
        memory = block.numpy()
        weakref.finalize(memory, self._free.append, block)  # the tensor alone refers to it
        if not num_bytes:
            return block.view(dtype).view(shape)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


Blocks = _Blocks | _DeviceBlocks
