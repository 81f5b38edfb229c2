"""Payloads in append-only files, each record with its checksum.

Owns the files `<number>.segment` of one folder and the index from ticket to record. A record is never
rewritten; a file is deleted whole once none of its records is needed. Invariant: what `read` returns
has the checksum that was written with it; a torn tail is cut and a damaged record is never returned.

    record = magic, ticket, attempt, body length, body digest, header digest | body
    body   = number of frames, their lengths | frames
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from asyncrl.wire import Frame

_MAGIC = b"AXP1"
_FIELDS = struct.Struct("<4sQIQQ")
_DIGEST = struct.Struct("<Q")
_HEADER_BYTES = _FIELDS.size + _DIGEST.size
SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class _Place:
    segment: int
    offset: int
    num_bytes: int
    attempt: int


class SegmentFolder:
    """The payload files of one buffer.

    Args:
        folder: Made if it is missing; one process at a time.
        segment_bytes: A file that has reached this size is closed and the next one begun.

    `counters` counts `torn_tails`, `torn_bytes` and `damaged_payloads`.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.counters: Counter[str] = Counter()
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._index: dict[int, _Place] = {}
        self._num_live: Counter[int] = Counter()
        self._numbers = sorted(int(path.stem) for path in folder.glob("*.segment"))
        for number in self._numbers:
            self._scan(number)
        self._active = (self._numbers or [0])[-1]
        self._file: int | None = None
        self._offset = 0
        self._begin_segment()

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        """Write a payload; it survives the end of this process at once, and a power cut after `sync`."""
        lengths = [len(frame) for frame in frames]
        body = b"".join([struct.pack(f"<I{len(frames)}Q", len(frames), *lengths), *frames])
        fields = _FIELDS.pack(_MAGIC, ticket, attempt, len(body), xxhash.xxh3_64_intdigest(body))
        record = b"".join([fields, _DIGEST.pack(xxhash.xxh3_64_intdigest(fields)), body])
        assert self._file is not None, "the folder is closed"
        _write_all(self._file, record)
        self._remember(ticket, _Place(self._active, self._offset, len(record), attempt))
        self._offset += len(record)
        if self._offset >= self._segment_bytes:
            self.sync()
            self._begin_segment()

    def holds(self, ticket: int, attempt: int) -> bool:
        """Tell whether this payload is there and undamaged."""
        return self.read(ticket, attempt) is not None

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        """Return the frames, or None if the payload is not there or damaged."""
        place = self._index.get(ticket)
        if place is None or place.attempt != attempt:
            return None
        with self._path(place.segment).open("rb") as file:
            file.seek(place.offset)
            record = file.read(place.num_bytes)
        body = _check_record(record)
        if body is None:
            self.counters["damaged_payloads"] += 1
            self.release(ticket)
            return None
        return _split_frames(body)

    def release(self, ticket: int) -> None:
        """Forget a payload; its file goes when it was the last one needed."""
        place = self._index.pop(ticket, None)
        if place is None:
            return
        self._num_live[place.segment] -= 1
        self._delete_if_unused(place.segment)

    def keep_only(self, tickets: Collection[int]) -> None:
        """Forget every payload but those of `tickets`, and delete files that hold none of them."""
        for ticket in [ticket for ticket in self._index if ticket not in tickets]:
            self.release(ticket)
        for number in list(self._numbers):
            self._delete_if_unused(number)

    def sync(self) -> None:
        """Force what was appended to the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.segment"

    def _begin_segment(self) -> None:
        self.close()
        finished, self._active, self._offset = self._active, self._active + 1, 0
        self._numbers.append(self._active)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL
        self._file = os.open(self._path(self._active), flags, 0o600)
        self._delete_if_unused(finished)

    def _delete_if_unused(self, number: int) -> None:
        if number in self._numbers and number != self._active and self._num_live[number] <= 0:
            self._numbers.remove(number)
            del self._num_live[number]
            self._path(number).unlink(missing_ok=True)

    def _remember(self, ticket: int, place: _Place) -> None:
        self.release(ticket)
        self._index[ticket] = place
        self._num_live[place.segment] += 1

    def _scan(self, number: int) -> None:
        """Index one file; cut what a killed process left half written, skip what is damaged."""
        path = self._path(number)
        size, offset = path.stat().st_size, 0
        with path.open("r+b") as file:
            while offset < size:
                head = file.read(_HEADER_BYTES)
                fields = _check_header(head)
                if fields is None or offset + _HEADER_BYTES + fields[2] > size:
                    self.counters["torn_tails"] += 1
                    self.counters["torn_bytes"] += size - offset
                    file.truncate(offset)
                    break
                ticket, attempt, body_bytes, _ = fields
                if _check_record(head + file.read(body_bytes)) is None:
                    self.counters["damaged_payloads"] += 1
                else:
                    self._remember(ticket, _Place(number, offset, _HEADER_BYTES + body_bytes, attempt))
                offset += _HEADER_BYTES + body_bytes


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _check_header(head: bytes) -> tuple[int, int, int, int] | None:
    """Return (ticket, attempt, body length, body digest), or None for no valid header."""
    if len(head) < _HEADER_BYTES:
        return None
    fields = head[: _FIELDS.size]
    (digest,) = _DIGEST.unpack(head[_FIELDS.size : _HEADER_BYTES])
    magic, ticket, attempt, body_bytes, body_digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or digest != xxhash.xxh3_64_intdigest(fields):
        return None
    return ticket, attempt, body_bytes, body_digest


def _check_record(record: bytes) -> bytes | None:
    """Return the body of a record, or None if a bit of it changed."""
    fields = _check_header(record[:_HEADER_BYTES])
    body = record[_HEADER_BYTES:]
    if fields is None or len(body) != fields[2] or xxhash.xxh3_64_intdigest(body) != fields[3]:
        return None
    return body


def _split_frames(body: bytes) -> list[bytes]:
    (num_frames,) = struct.unpack_from("<I", body)
    lengths = struct.unpack_from(f"<{num_frames}Q", body, 4)
    offset, frames = 4 + 8 * num_frames, []
    for length in lengths:
        frames.append(body[offset : offset + length])
        offset += length
    return frames
