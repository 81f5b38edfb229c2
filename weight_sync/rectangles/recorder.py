"""Recorder of a weight loader: which rectangles of the checkpoint it reads, learned while it loads.

A dispatch mode looks at each operation of the load: views are followed by their addresses, and the elements
of a checkpoint tensor that any other operation takes in are read. The load itself is not changed. Invariant:
what is recorded contains all that was read through torch; what no rectangles describe is the whole tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.core.errors import SyncError
from weight_sync.rectangles.parcels import Region
from weight_sync.rectangles.rectangle import Rectangle
from weight_sync.rectangles.strides import NotARectangle, View, find_rectangles

MANY = 1024
"""Rectangles of one read, from which on the whole tensor is recorded: a plan of more takes too long."""


class ReadRecorder(TorchDispatchMode):
    """Dispatch mode that records what is read of `tensors`, which are dense and in the host's memory.

    Other modes may be below it or above it.

    Example:
        with ReadRecorder(tensors) as recorder:
            model.load_weights(tensors)
        recorder.regions
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        sources = [(tensor.data_ptr(), name, tensor) for name, tensor in tensors]
        self._sources = sorted(sources, key=lambda source: source[0])
        self._starts = [start for start, _, _ in self._sources]
        self._regions: dict[Region, None] = {}
        self._written = ""

    @property
    def regions(self) -> list[Region]:
        """What was read until now.

        Raises:
            SyncError: The loader wrote into a tensor of the checkpoint, which a later load may have to read.
        """
        if self._written:
            raise SyncError(f"the loader writes into '{self._written}' of the checkpoint")
        return list(self._regions)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if _makes_views(func):
            return func(*args, **kwargs)
        found = [self._find(tensor) for tensor in _find_tensors((*args, *kwargs.values()))]
        read = [region for regions in found for region in regions]
        if func._schema.is_mutable and read and found[0]:
            self._written = read[0][0]
        result = func(*args, **kwargs)
        # Nothing is read for a result that has no elements: vLLM counts them by a load to the meta device.
        if not (isinstance(result, torch.Tensor) and result.is_meta):
            self._regions.update(dict.fromkeys(read))
        return result

    def _find(self, tensor: torch.Tensor) -> list[Region]:
        """Return the regions that `tensor` is a view of."""
        address = tensor.data_ptr()  # 0 if it has no elements; a GPU's are none of the host's
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return []
        start, name, source = self._sources[index]
        if address >= start + source.nbytes:
            return []
        offset = (address - start) // source.itemsize
        view = View(tuple(source.shape), tuple(tensor.shape), tuple(tensor.stride()), offset)
        try:
            if tensor.itemsize != source.itemsize:
                raise NotARectangle("elements of another size")
            found = list(find_rectangles(view, MANY))
        except NotARectangle:
            found = [Rectangle.whole(source.shape)]
        return [(name, rectangle) for rectangle in found]


def _find_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _find_tensors(value)


def _makes_views(func: OpOverload) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
