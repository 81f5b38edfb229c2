"""A verified copy of one version in shared memory, and its tensors without copying.

The engine's side of weight sync: it gets a `Staged` from `weight_sync.link` and reads the tensors.
The file is reused once the load was reported, so no view may be kept beyond that.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from asyncrl.core.errors import SyncError
from asyncrl.core.staleness import PolicyVersion
from weight_sync.memory import segments
from weight_sync.memory.manifest import Manifest, TensorEntry

if TYPE_CHECKING:
    from weight_sync.direct.seat import DeskAddress


@dataclass(frozen=True)
class Staged:
    """Version `version`, complete and verified, in the file at `path`.

    Attributes:
        path: Empty if the engine's workers hold the version themselves.
        desk: Where the workers ask for orders, to receive the next versions themselves.
    """

    version: PolicyVersion
    path: str
    manifest: Manifest
    desk: DeskAddress | None = None


def open_tensors(staged: Staged) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) in the manifest's order; tensors are views of the mapped file.

    The views are private to this process (copy on write): a loader that writes into one changes
    nothing for others. Valid until the load of this version is reported.

    Raises:
        SyncError: The file is gone, of another size, or for another version than `staged`.
    """
    if staged.manifest.version != staged.version:
        raise SyncError(f"a copy of {staged.version} has the manifest of {staged.manifest.version}")
    mapping = segments.attach(staged.path, staged.manifest.total_bytes, mmap.MAP_PRIVATE)
    for entry in staged.manifest.tensors:
        yield entry.name, view_tensor(mapping, entry)


def view_tensor(mapping: object, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor `entry` as a view of `mapping`."""
    dtype = getattr(torch, entry.dtype)
    num_elements = entry.num_bytes // dtype.itemsize
    if num_elements == 0:
        return torch.empty(entry.shape, dtype=dtype)
    flat = torch.frombuffer(mapping, dtype=dtype, count=num_elements, offset=entry.offset)
    return flat.view(entry.shape)
