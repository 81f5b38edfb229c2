"""Choice of a bucket's encoding: the shorter of its bytes and the difference (pure).

Invariant: a difference is chosen only if it takes fewer bytes than the bucket itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weight_sync.encoding.sparse import WIDTHS, Bytes, Sparse, encode
from weight_sync.memory.manifest import ITEM_BYTES, Layout

NUM_SAMPLES = 64
SAMPLE_BYTES = 1 << 10
MAX_SAMPLED_SHARE = 0.95
"""Of elements changed in the sample: beyond, a difference is not tried. At 0.95 it could not be shorter:
15/16 of 2-byte elements take as many bytes as all of them."""


def choose_widths(layout: Layout) -> list[int]:
    """Return for each bucket the bytes per element of the dtype that fills most of it."""
    filled: list[dict[int, int]] = [{} for _ in range(layout.num_buckets)]
    for entry in layout.tensors:
        width = ITEM_BYTES[entry.dtype]
        for index, start, end in layout.pieces(entry):
            if index < len(filled):
                filled[index][width] = filled[index].get(width, 0) + end - start
    return [_width_of(counts, layout, index) for index, counts in enumerate(filled)]


def choose_width(counts: Mapping[int, int], *edges: int) -> int:
    """Return the bytes per element of most bytes in `counts`, 1 if that divides not all of `edges`."""
    width = max(counts, key=lambda width: counts[width], default=1)
    return width if not any(edge % width for edge in edges) else 1


def choose(old: Bytes | None, new: Bytes, width: int) -> Sparse | None:
    """Return the difference to send instead of `new`, or None if `new` itself is not longer."""
    if old is None or not len(new) or _looks_dense(old, new, width):
        return None
    return encode(old, new, width, max_bytes=len(new))


def _width_of(counts: dict[int, int], layout: Layout, index: int) -> int:
    start = index * layout.bucket_bytes
    return choose_width(counts, start, min(start + layout.bucket_bytes, layout.total_bytes))


def _looks_dense(old: Bytes, new: Bytes, width: int) -> bool:
    """Look at a few places: after a step in float32 everything has changed, and a whole scan is in vain."""
    num_elements = len(new) // width
    size = SAMPLE_BYTES // width
    if num_elements < 4 * NUM_SAMPLES * size:
        return False
    starts = np.linspace(0, num_elements - size, NUM_SAMPLES, dtype=np.int64)
    old_E, new_E = old.view(WIDTHS[width]), new.view(WIDTHS[width])
    changed = sum(int(np.count_nonzero(old_E[at : at + size] != new_E[at : at + size])) for at in starts)
    return changed > MAX_SAMPLED_SHARE * NUM_SAMPLES * size
