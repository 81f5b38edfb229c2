"""Copies from the host's memory to a GPU through pinned buffers, of code that knows nothing of them.

An engine's loader gets tensors of the host, cuts out the part of its worker and copies that into a parameter.
Within `PinnedCopies` that last copy alone goes through the pipeline: a worker moves its own slices and not
the whole model, the GPU needs no memory besides the parameters, and while the bus moves one piece the host
packs the next.
Invariants: when a copy returns its source has been read; the values are those of a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.copies.pinned import Copy, PinnedPipeline


class PinnedCopies(TorchDispatchMode):
    """Dispatch mode that routes copies from host tensors to GPU tensors through `pipeline`.

    Example:
        with PinnedCopies(PinnedPipeline(BUFFER_BYTES)):
            model.load_weights(tensors)
    """

    def __init__(self, pipeline: PinnedPipeline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pipeline = pipeline
        self.num_copies = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        assert isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor)
        if not target.is_cuda or source.device.type != "cpu" or not target.numel():
            return func(*args, **(kwargs or {}))
        for _ in self._pipeline.run(pieces(source.expand(target.shape), target, self._pipeline.buffer_bytes)):
            self.num_copies += 1
        return target


def pieces(source: torch.Tensor, target: torch.Tensor, most_bytes: int) -> Iterator[Copy[None]]:
    """Yield the copies that make up one of tensors of the same shape, each of `most_bytes` at most."""
    num_bytes = target.numel() * target.itemsize
    if num_bytes <= most_bytes or not target.dim():
        yield Copy(source, target, None)
        return
    num_rows = most_bytes * len(target) // num_bytes
    for row in range(0, len(target), max(1, num_rows)):
        if num_rows:
            yield Copy(source[row : row + num_rows], target[row : row + num_rows], None)
        else:
            yield from pieces(source[row], target[row], most_bytes)
