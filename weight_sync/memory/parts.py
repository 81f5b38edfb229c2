"""Writer of one rank's parts of a version, straight into a mapped segment.

A rank's *part* is a rectangle of a full tensor; it is copied as the view it is. On the CPU the pieces
stay in the processor's cache; from a GPU they come through two pinned buffers of 64 MiB. Owns the place of
each part and the digests of *whole* buckets: those that this rank writes alone, from the first byte to the
last, digested piece by piece right after the copy.
Buckets that several ranks write can only be digested once all have written.
Invariants: zeros between tensors are written by the rank that holds the tensor's last element; on the
CPU no bytes of a part are copied anywhere else on the way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from asyncrl.core.errors import SyncError
from weight_sync.copies.pinned import BUFFER_BYTES, Copy, PinnedPipeline
from weight_sync.memory.manifest import ITEM_BYTES, Layout, TensorEntry, align
from weight_sync.memory.writer import PIECE_BYTES, Bytes, WriteTimes


@dataclass(frozen=True, eq=False)
class Part:
    """A rectangle of a full tensor, which is seen as a matrix [first dimension, product of the others].

    Attributes:
        name: Of the full tensor.
        shape: Of the full tensor.
        row: First row of the rectangle.
        column: First column of the rectangle.
        values_RC: Its rows and columns, on any device; converted if the tensor is published in another
            dtype. A view of live weights: it is valid until the next update.
    """

    name: str
    shape: tuple[int, ...]
    row: int
    column: int
    values_RC: torch.Tensor


def split_parts(parts: Sequence[Part], index: int, count: int) -> list[Part]:
    """Return the share of rank `index` of `count` ranks that all hold the same `parts`: equal bytes.

    A share is a run of the parts, cut between rows, so that it fills buckets from end to end.
    """
    sizes = [part.values_RC.numel() * part.values_RC.itemsize for part in parts]
    low, high = sum(sizes) * index // count, sum(sizes) * (index + 1) // count
    shares, start = [], 0
    for part, size in zip(parts, sizes, strict=True):
        num_rows = len(part.values_RC)
        row_bytes = size // num_rows if num_rows else 1
        first, last = (max(0, min(num_rows, -((start - limit) // row_bytes))) for limit in (low, high))
        start += size
        if first < last and size:
            values_RC = part.values_RC[first:last]
            shares.append(Part(part.name, part.shape, part.row + first, part.column, values_RC))
    return shares


@dataclass(frozen=True)
class _Spot:
    """Place of a part: rows `start + i * stride_bytes`, each `width_bytes` long."""

    entry: TensorEntry
    part: Part
    start: int
    stride_bytes: int
    width_bytes: int

    @property
    def is_run(self) -> bool:
        """Whether the part is one run of bytes."""
        return self.width_bytes == self.stride_bytes

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.start + (len(self.part.values_RC) - 1) * self.stride_bytes + self.width_bytes


class PartWriter:
    """Writes the parts of one rank into segments of one layout.

    >>> # writer = PartWriter(layout, parts)
    >>> # digests = writer.write(bytes_B, times)   # of writer.whole_buckets
    >>> # digests |= writer.digest(bytes_B, [3, 5], times)   # once all ranks have written

    Raises:
        SyncError: A part does not fit the layout.
    """

    def __init__(self, layout: Layout, parts: Sequence[Part]) -> None:
        self._layout = layout
        entries = {entry.name: entry for entry in layout.tensors}
        spots = [_place(entries.get(part.name), part) for part in parts if part.values_RC.numel()]
        self._spots = sorted(spots, key=lambda spot: spot.start)
        self._sources = [_plain_bytes(spot) for spot in self._spots]
        self._gaps = [gap for spot in self._spots for gap in _gap_after(spot)]
        self.num_bytes = sum(spot.width_bytes * len(spot.part.values_RC) for spot in self._spots)
        self.whole_buckets = self._find_whole_buckets()
        self._pipeline: PinnedPipeline | None = None

    def write(self, bytes_B: Bytes, times: WriteTimes) -> dict[int, bytes]:
        """Copy all parts into the mapped segment; return the digests of the whole buckets."""
        for start, end in self._gaps:
            bytes_B[start:end] = 0
        digester = _Digester(self._layout, self.whole_buckets, bytes_B)
        began = time.perf_counter()
        for end in self._copy(bytes_B):
            copied = time.perf_counter()
            digester.advance(end)
            times.copy_s += copied - began
            began = time.perf_counter()
            times.digest_s += began - copied
        digester.advance(self._layout.total_bytes)
        times.digest_s += time.perf_counter() - began
        return digester.digests

    def _copy(self, bytes_B: Bytes) -> Iterator[int]:
        """Copy piece by piece, in ascending order; yield the byte after each."""
        if any(spot.part.values_RC.is_cuda for spot in self._spots):
            self._pipeline = self._pipeline or PinnedPipeline(BUFFER_BYTES)
            yield from self._pipeline.run(
                copy for spot in self._spots for copy in _copies(bytes_B, spot, BUFFER_BYTES)
            )
            return
        for spot, source in zip(self._spots, self._sources, strict=True):
            if source is not None:
                yield from _copy_bytes(bytes_B, spot, source)
                continue
            for copy in _copies(bytes_B, spot, PIECE_BYTES):
                copy.target.copy_(copy.source)
                yield copy.name

    def digest(self, bytes_B: Bytes, buckets: Sequence[int], times: WriteTimes) -> dict[int, bytes]:
        """Return the digests of `buckets` as they lie in the segment."""
        began = time.perf_counter()
        size = self._layout.bucket_bytes
        digests = {i: xxhash.xxh3_128(bytes_B[i * size : (i + 1) * size].data).digest() for i in buckets}
        times.digest_s += time.perf_counter() - began
        return digests

    def _find_whole_buckets(self) -> frozenset[int]:
        runs = [(spot.start, spot.end) for spot in self._spots if spot.is_run]
        filled: dict[int, int] = {}
        size = self._layout.bucket_bytes
        for start, end in [*runs, *self._gaps]:
            for index in range(start // size, -(-end // size)):
                inside = min(end, (index + 1) * size) - max(start, index * size)
                filled[index] = filled.get(index, 0) + inside
        total = self._layout.total_bytes
        return frozenset(i for i, count in filled.items() if count == min(size, total - i * size))


class _Digester:
    """Digests the whole buckets behind a front that moves over the address space."""

    def __init__(self, layout: Layout, whole: frozenset[int], bytes_B: Bytes) -> None:
        self._size, self._total = layout.bucket_bytes, layout.total_bytes
        self._whole, self._bytes_B = whole, bytes_B
        self._at = 0
        self._digest = xxhash.xxh3_128()
        self.digests: dict[int, bytes] = {}

    def advance(self, end: int) -> None:
        """Move the front to `end`: digest the bytes behind it, all written, of whole buckets."""
        while self._at < end:
            index = self._at // self._size
            bucket_end = min((index + 1) * self._size, self._total)
            stop = min(end, bucket_end)
            if index in self._whole:
                self._digest.update(self._bytes_B[self._at : stop].data)
                if stop == bucket_end:
                    self.digests[index] = self._digest.digest()
                    self._digest = xxhash.xxh3_128()
            self._at = stop


def _place(entry: TensorEntry | None, part: Part) -> _Spot:
    """Return where `part` belongs; raises SyncError if there is no such place."""
    if entry is None or entry.shape != part.shape:
        wanted = entry.shape if entry is not None else None
        raise SyncError(
            f"the tensor ('{part.name}', {part.shape}) came where the versions before had {wanted}",
            hint="A run publishes the same names, dtypes and shapes in the same order",
        )
    num_rows, num_columns = (part.shape[0], math.prod(part.shape[1:])) if part.shape else (1, 1)
    height, width = part.values_RC.shape
    assert part.row + height <= num_rows, f"{part.name} has too many rows"
    assert part.column + width <= num_columns, f"{part.name} has too many columns"
    item_bytes = ITEM_BYTES[entry.dtype]
    start = entry.offset + (part.row * num_columns + part.column) * item_bytes
    return _Spot(entry, part, start, num_columns * item_bytes, width * item_bytes)


def _gap_after(spot: _Spot) -> Iterator[tuple[int, int]]:
    """Yield the zeros after the tensor, if the part has its last element."""
    end = spot.entry.offset + spot.entry.num_bytes
    if spot.end == end and align(end) > end:
        yield end, align(end)


def _plain_bytes(spot: _Spot) -> Bytes | None:
    """Return the part's rows as bytes, which share its memory; None if they must be converted or fetched."""
    values_RC = spot.part.values_RC.detach()
    is_same = values_RC.dtype == getattr(torch, spot.entry.dtype)
    if values_RC.device.type != "cpu" or not is_same or not values_RC.is_contiguous():
        return None
    flat: Bytes = values_RC.reshape(-1).view(torch.uint8).numpy()
    return flat if spot.is_run else flat.reshape(len(values_RC), -1)


def _copy_bytes(bytes_B: Bytes, spot: _Spot, source: Bytes) -> Iterator[int]:
    """Copy piece by piece; yield the byte after each."""
    if spot.is_run:
        for at in range(0, len(source), PIECE_BYTES):
            piece = source[at : at + PIECE_BYTES]
            end = spot.start + at + len(piece)
            bytes_B[spot.start + at : end] = piece
            yield end
        return
    tensor_B = bytes_B[spot.entry.offset : spot.entry.offset + spot.entry.num_bytes]
    left = (spot.start - spot.entry.offset) % spot.stride_bytes
    rows = tensor_B.reshape(-1, spot.stride_bytes)[spot.part.row :, left : left + spot.width_bytes]
    rows[: len(source)] = source
    yield spot.end


def _copies(bytes_B: Bytes, spot: _Spot, most_bytes: int) -> Iterator[Copy[int]]:
    """Yield the copies of a part from any device and of any dtype, in order, each of `most_bytes` at most.

    A copy's name is the byte after its last.
    """
    entry, part = spot.entry, spot.part
    tensor_B = torch.from_numpy(bytes_B[entry.offset : entry.offset + entry.num_bytes])
    dtype: Any = getattr(torch, entry.dtype)
    full_RC = tensor_B.view(dtype).view(-1, spot.stride_bytes // dtype.itemsize)
    source_RC = part.values_RC.detach()
    height, width = source_RC.shape
    target_RC = full_RC[part.row : part.row + height, part.column : part.column + width]
    num_rows, num_columns = max(1, most_bytes // spot.width_bytes), max(1, most_bytes // dtype.itemsize)
    for row in range(0, height, num_rows):
        rows = slice(row, min(row + num_rows, height))
        for column in range(0, width, num_columns):  # more than one where a row is wider than that
            columns = slice(column, min(column + num_columns, width))
            end = spot.start + (rows.stop - 1) * spot.stride_bytes + columns.stop * dtype.itemsize
            yield Copy(source_RC[rows, columns], target_RC[rows, columns], end)


def merge_digests(tables: Sequence[Mapping[int, bytes]], num_buckets: int) -> bytes:
    """Return digests by bucket as one run of bytes, zeros where a bucket has none."""
    empty = bytes(xxhash.xxh3_128().digest_size)
    return b"".join(next((t[i] for t in tables if i in t), empty) for i in range(num_buckets))
