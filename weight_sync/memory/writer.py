"""Segment writer: copies one version piece by piece, and digests each bucket on the way.

Owns the learner's mappings of segments and the order of copy and digest. A piece is digested while the
copy still has it in the processor's cache: with pieces of 512 KiB, 100 MB took 1.2 times a plain copy
(2.2 with one write and one digest per 64 MiB bucket; L2 of 2 MB).
Invariant: digests are computed from the source tensors, so a receiver detects a corrupt copy.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from asyncrl.core.errors import SegmentGone, SyncError
from weight_sync.memory import segments
from weight_sync.memory.manifest import ALIGNMENT_BYTES, Bucket, align

PIECE_BYTES = 512 << 10
_PADDING = np.zeros(ALIGNMENT_BYTES, dtype=np.uint8)

Bytes = npt.NDArray[np.uint8]


class Place(Protocol):
    """Destination of bytes."""

    def put(self, offset: int, piece: Bytes) -> None: ...


class MappedPlace:
    """A segment of known size, mapped: a write is a memcpy, without a system call."""

    def __init__(self, bytes_B: Bytes) -> None:
        self._bytes_B = bytes_B

    def put(self, offset: int, piece: Bytes) -> None:
        self._bytes_B[offset : offset + len(piece)] = piece


class GrowingPlace:
    """A segment whose size is not known before its end: the file grows. For a run's first version."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise SegmentGone(f"the segment {path} is gone") from error
        except OSError as error:
            raise SyncError(f"cannot open the segment {path}: {error.strerror}") from error
        self._path = path

    def __enter__(self) -> GrowingPlace:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def put(self, offset: int, piece: Bytes) -> None:
        done = 0
        while done < len(piece):
            try:
                done += os.pwrite(self._fd, piece[done:].data, offset + done)
            except OSError as error:
                raise SyncError(
                    f"cannot write to the segment {self._path}: {error.strerror}",
                    hint="Give the host or the container a larger /dev/shm",
                ) from error


class Mappings:
    """The learner's mappings of the publisher's segments, kept from version to version.

    A new mapping costs a page fault per 4 KiB, about half as long as the copy itself. Segment
    names are never reused, so a removed path never becomes valid again.
    """

    def __init__(self) -> None:
        self._by_path: dict[str, Bytes] = {}

    def open(self, path: str, num_bytes: int) -> Bytes:
        """Return the mapped segment at `path`; raises SyncError if it is gone or of another size."""
        known = self._by_path.get(path)
        if known is not None and len(known) == num_bytes and os.path.exists(path):
            return known
        for gone in [other for other in self._by_path if not os.path.exists(other)]:
            del self._by_path[gone]
        mapping = segments.attach(path, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._by_path[path] = np.frombuffer(mapping, dtype=np.uint8)
        return self._by_path[path]


@dataclass
class WriteTimes:
    """Seconds spent in copying, and in digesting."""

    copy_s: float = 0.0
    digest_s: float = 0.0


class SegmentWriter:
    """Appends tensors to a version, each at the next aligned byte; see the module.

    Args:
        span: First byte of some buckets and the one after their last. These alone are digested, and copied to
            the start of `place`.
    """

    def __init__(self, place: Place, bucket_bytes: int, span: tuple[int, float] = (0, math.inf)) -> None:
        self._place, self._span = place, span
        self._bucket_bytes = bucket_bytes
        self._end = 0
        self._digest = xxhash.xxh3_128()
        self._buckets: list[Bucket] = []
        self.times = WriteTimes()

    def write(self, tensor: torch.Tensor) -> None:
        """Append `tensor`, on any device, and zeros up to the next aligned byte."""
        num_bytes = tensor.numel() * tensor.itemsize
        if self._end + num_bytes > self._span[0] and self._end < self._span[1]:
            self._append(bytes_of(tensor))
        else:  # not fetched from its device
            self._end += num_bytes
        padding = align(self._end) - self._end
        if padding:
            self._append(_PADDING[:padding])

    def finish(self) -> tuple[Bucket, ...]:
        """Return the buckets of the span."""
        if self._end % self._bucket_bytes:
            self._end_bucket(self._end % self._bucket_bytes)
        return tuple(self._buckets)

    def _append(self, data: Bytes) -> None:
        position, num_bytes = 0, len(data)
        while position < num_bytes:
            room = self._bucket_bytes - self._end % self._bucket_bytes
            piece = data[position : position + min(room, PIECE_BYTES)]
            if self._is_own(self._end):
                start = time.perf_counter()
                self._place.put(self._end - self._span[0], piece)
                copied = time.perf_counter()
                self._digest.update(piece.data)
                self.times.copy_s += copied - start
                self.times.digest_s += time.perf_counter() - copied
            position, self._end = position + len(piece), self._end + len(piece)
            if self._end % self._bucket_bytes == 0:
                self._end_bucket(self._bucket_bytes)

    def _is_own(self, offset: int) -> bool:
        return self._span[0] <= offset < self._span[1]

    def _end_bucket(self, num_bytes: int) -> None:
        if self._is_own(self._end - num_bytes):
            self._buckets.append(Bucket(num_bytes, self._digest.hexdigest()))
            self._digest = xxhash.xxh3_128()


def digest_of(buckets: Iterable[Bucket]) -> str:
    """Return the xxh3-128 digest of the buckets' digests in order, in hex."""
    return xxhash.xxh3_128_hexdigest("".join(bucket.digest for bucket in buckets).encode())


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the tensor's elements in order as bytes in host memory, without a copy if possible."""
    if tensor.numel() == 0:
        return _PADDING[:0]
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
