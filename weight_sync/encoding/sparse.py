"""Sparse difference of two byte runs of one length: exact, and small where little differs (pure).

Owns the format. Bytes are seen as elements of `width` bytes (1, 2, 4 or 8; a float is never looked at as a
number, so -0.0, NaN and every bit come out as they went in). A difference is the positions of the changed
elements, in one of two codes, and the new elements as they are, in order:

    GAPS     one byte per changed element: how many unchanged ones stand before it, since the last changed
             one. A byte of 255 adds 255 and the next byte goes on. Then the new elements.
    BITMAP   one bit per element, the first in the lowest bit. Then the new elements.

With a share c of elements changed at random, GAPS takes about c·(1 + width) bytes per element and BITMAP
1/8 + c·width: the codes cross at c = 1/8.
Invariant: `decode(old, encode(old, new)) == new`, byte for byte; an invalid encoding is refused and never
read or written beyond its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from asyncrl.core.errors import WireError

BLOCK_ELEMENTS = 1 << 17
"""Compared at once: old, new and the mask of 2-byte elements stay in a cache of 2 MB."""
ESCAPE = 255
BITS = 8
WIDTHS: dict[int, type[np.uint8 | np.uint16 | np.uint32 | np.uint64]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


class Code(IntEnum):
    """Code of positions."""

    GAPS = 1
    BITMAP = 2


@dataclass(frozen=True)
class Sparse:
    """The difference. `data` holds the positions and then the new elements."""

    code: Code
    width: int
    num_changed: int
    data: Bytes


def encode(old: Bytes, new: Bytes, width: int, max_bytes: int) -> Sparse | None:
    """Return how `new` differs from `old`, or None if that takes `max_bytes` or more.

    Args:
        width: Bytes per element; both lengths are multiples of it.
    """
    assert len(old) == len(new), "a difference is between runs of bytes of one length"
    assert width in WIDTHS and not len(new) % width, f"elements of {width} bytes do not fill {len(new)}"
    old_E, new_E = old.view(WIDTHS[width]), new.view(WIDTHS[width])
    positions: list[Positions] = []
    num_changed = 0
    for found in _changed(old_E, new_E):
        positions.append(found)
        num_changed += len(found)
        if num_changed * width >= max_bytes:
            return None
    changed = np.concatenate(positions) if positions else np.empty(0, np.int64)
    return assemble(changed, new_E[changed], max_bytes, len(new_E))


def assemble(
    positions: Positions, values: npt.NDArray[np.generic], max_bytes: int, num_elements: int
) -> Sparse | None:
    """Return the difference in these elements of `num_elements`; None as of `encode`."""
    code, written = _write_positions(positions, num_elements)
    if len(written) + values.nbytes >= max_bytes:
        return None
    data = np.concatenate([written, values.view(np.uint8)])
    return Sparse(code, values.itemsize, len(positions), data)


def decode(target: Bytes, sparse: Sparse) -> None:
    """Turn `target`, which holds the old bytes, into the new ones.

    Raises:
        WireError: `sparse` is no difference for so many bytes; `target` is as it was.
    """
    width, num_changed = sparse.width, sparse.num_changed
    if width not in WIDTHS or len(target) % width:
        raise WireError(f"a difference has elements of {width} bytes for {len(target)}")
    num_written = len(sparse.data) - num_changed * width
    if num_changed < 0 or num_written < 0:
        raise WireError(f"a difference of {len(sparse.data)} bytes says that {num_changed} elements changed")
    target_E = target.view(WIDTHS[width])
    positions = _read_positions(sparse.code, sparse.data[:num_written], len(target_E))
    if len(positions) != num_changed:
        raise WireError(f"a difference of {num_changed} elements names {len(positions)}")
    values = sparse.data[num_written:].copy()  # so that they are aligned, wherever the positions end
    target_E[positions] = values.view(WIDTHS[width])


def _changed(old_E: npt.NDArray[np.generic], new_E: npt.NDArray[np.generic]) -> Iterator[Positions]:
    """Yield the positions of elements that differ, block by block."""
    for start in range(0, len(new_E), BLOCK_ELEMENTS):
        end = start + BLOCK_ELEMENTS
        found = np.flatnonzero(old_E[start:end] != new_E[start:end])
        if len(found):
            yield found + start


def _write_positions(positions: Positions, num_elements: int) -> tuple[Code, Bytes]:
    """Return the shorter code of rising `positions`."""
    gaps = np.diff(positions, prepend=-1) - 1
    wide = np.flatnonzero(gaps >= ESCAPE)  # few: at a share of 3 % one in 2000
    num_escapes = gaps[wide] // ESCAPE
    if len(gaps) + int(num_escapes.sum()) <= -(-num_elements // BITS):
        gaps[wide] %= ESCAPE
        written = gaps.astype(np.uint8)
        return Code.GAPS, np.insert(written, np.repeat(wide, num_escapes), ESCAPE) if len(wide) else written
    mask = np.zeros(num_elements, bool)
    mask[positions] = True
    return Code.BITMAP, np.packbits(mask, bitorder="little")


def _read_positions(code: Code, written: Bytes, num_elements: int) -> Positions:
    """Return the positions in `written`, which rise and are less than `num_elements`."""
    if code is Code.BITMAP:
        if len(written) != -(-num_elements // BITS):
            raise WireError(f"a difference has {len(written)} bytes of positions for {num_elements} elements")
        mask = np.unpackbits(written, bitorder="little")
        if mask[num_elements:].any():
            raise WireError("a difference names an element that is not there")
        return np.flatnonzero(mask[:num_elements])
    ends = np.flatnonzero(written != ESCAPE)
    if len(written) and (not len(ends) or ends[-1] != len(written) - 1):
        raise WireError("a difference ends in the middle of a position")
    positions: Positions = np.cumsum(written, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(positions) and positions[-1] >= num_elements:
        raise WireError("a difference names an element that is not there")
    return positions
