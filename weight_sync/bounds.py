"""Bounds of a version that follow from the run's model: what its tensors and their description may take.

Read once, where a service is built. Without them one message of a holder of the run's keys would fill shared
memory (a manifest of 156 bytes named 2 GiB), or the coordinator's (64 MiB of empty maps take 4.9 GB).
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from asyncrl.core.config.tree import Config
from asyncrl.core.rpc import Limits
from asyncrl.core.wire import MAX_REQUEST_BYTES
from asyncrl.models.weight_files import read_shapes
from weight_sync.memory.manifest import ANY_VERSION, ITEM_BYTES, VersionBounds

SPARE = 2
"""A version may take so many times what the files imply: a head that the files leave out because it is tied,
tensors that stay float32, and the places between them."""
SPARE_BYTES = 1 << 20
"""Beyond that, of weights and of a manifest: padding, and the probe."""
ROW_BYTES, BUCKET_BYTES = 128, 48
"""Of a manifest for each tensor, without its name, and for each bucket."""


def bounds_of(config: Config) -> VersionBounds:
    """Return what a version of the run's model may take; that of any model if its files cannot be read."""
    sizes = {name: prod(shape) for name, shape in read_shapes(Path(config.model.path)).items()}
    if not sizes:
        return ANY_VERSION
    total_bytes = SPARE * sum(sizes.values()) * ITEM_BYTES[config.model.dtype] + SPARE_BYTES
    rows = sum(len(name.encode()) + ROW_BYTES for name in sizes)
    buckets = BUCKET_BYTES * -(-total_bytes // config.weight_sync.bucket_bytes)
    return VersionBounds(total_bytes, SPARE * rows + buckets + SPARE_BYTES)


def limits_of(bounds: VersionBounds) -> Limits:
    """Return what a request to a service of weight sync may be: a header, and at most a manifest."""
    longest = 2 * bounds.manifest_bytes + MAX_REQUEST_BYTES  # who is a little over is told, not cut off
    return Limits(frame_bytes=longest, message_bytes=longest, num_parts=4)
