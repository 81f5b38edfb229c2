"""Payloads in append-only files.

Owns the files `<number>.segment` of one folder and the index from (ticket, attempt) to record
(`records`). A record is never rewritten; a file is deleted whole once none of its records is needed, at
once or when its owner says so.
Invariant: what `read` returns has the checksum that was written with it; a torn tail is cut, and a
damaged record is found when it is read. Opening a folder reads headers and no bodies.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffer.journals.records import (
    HEADER_BYTES,
    MAGIC,
    RecordHeader,
    make_record,
    read_frames,
    read_header,
)
from asyncrl.core.files.durable import sync_path
from asyncrl.core.runtime.faults import fault_point, is_wanted
from asyncrl.core.wire import Frame

SEGMENT_BYTES = 64 << 20
RECENT_SEGMENTS = 3
"""The newest files, which are there anyway. An older one may be kept by a single record."""


@dataclass(frozen=True, slots=True)
class _Place:
    segment: int
    offset: int
    num_bytes: int


class SegmentFolder:
    """The payload files of one buffer.

    Args:
        folder: Made if it is missing; one process at a time.
        segment_bytes: A file that has reached this size is closed and the next one begun.
        sync: Forces a file to the disk.
        keeps_unneeded: Leave files that nobody needs until `delete`: what made them so may not be on the
            disk yet, and a power cut would take that back but not the deletion.

    `counters` counts `torn_tails`, `torn_bytes`, `damaged_headers` and `damaged_payloads`.
    """

    def __init__(
        self,
        folder: Path,
        segment_bytes: int = SEGMENT_BYTES,
        sync: Callable[[int], None] = os.fsync,
        keeps_unneeded: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.counters: Counter[str] = Counter()
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._sync_file = sync
        self._index: dict[int, dict[int, _Place]] = {}
        self._num_live: Counter[int] = Counter()
        self._keeps_unneeded = keeps_unneeded
        self._unneeded: list[int] = []
        self._numbers = sorted(int(path.stem) for path in folder.glob("*.segment"))
        self._active = (self._numbers or [0])[-1]
        for number in list(self._numbers):
            self._scan(number)
        self._file: int | None = None
        self._finished: list[int] = []
        self._offset = 0
        self._begin_segment()

    def take_unsynced(self) -> list[int]:
        """Return descriptors of all that `sync` would force to the disk; the caller syncs and closes them."""
        taken, self._finished = self._finished, []
        return taken if self._file is None else [*taken, os.dup(self._file)]

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        """Write a payload; it survives the end of this process at once, and a power cut after `sync`.

        Raises:
            OSError: The disk takes no more, or fails. Nothing of the record is left behind.
        """
        record = make_record(ticket, attempt, frames)
        assert self._file is not None, "the folder is closed"
        if is_wanted("buffer.appending", ticket):  # die with half of a record written
            _write_all(self._file, record[: len(record) // 2])
            fault_point("buffer.appending", ticket)
        try:
            _write_all(self._file, record)
        except OSError:
            self._cut_torn_record()
            raise
        self._remember(ticket, attempt, _Place(self._active, self._offset, len(record)))
        self._offset += len(record)
        if self._offset >= self._segment_bytes:
            self._begin_segment()

    def _cut_torn_record(self) -> None:
        """Let the next record begin where the index says that it does."""
        assert self._file is not None
        try:
            os.ftruncate(self._file, self._offset)
        except OSError:
            self._begin_segment()  # the torn end of this one is cut when it is scanned

    def holds(self, ticket: int, attempt: int) -> bool:
        """Tell whether this payload is there; whether it is undamaged, only `read` knows."""
        return attempt in self._index.get(ticket, ())

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        """Return the frames, or None if the payload is not there or damaged."""
        place = self._index.get(ticket, {}).get(attempt)
        if place is None:
            return None
        with self._path(place.segment).open("rb", buffering=0) as file:
            record = os.pread(file.fileno(), place.num_bytes, place.offset)
        frames = read_frames(record, ticket, attempt)
        if frames is None:
            self.counters["damaged_payloads"] += 1
            self._forget(self._index[ticket].pop(attempt))
        return frames

    def release(self, ticket: int) -> None:
        """Forget a ticket's payloads; a file goes when it held the last one needed."""
        for place in self._index.pop(ticket, {}).values():
            self._forget(place)

    def is_recent(self, ticket: int) -> bool:
        """Tell whether a ticket's payloads are all in the newest files."""
        places = self._index.get(ticket, {}).values()
        return all(place.segment > self._active - RECENT_SEGMENTS for place in places)

    def _forget(self, place: _Place) -> None:
        self._num_live[place.segment] -= 1
        self._delete_if_unused(place.segment)

    def keep_only(self, tickets: Collection[int]) -> None:
        """Forget all payloads but those of `tickets`, and delete files that hold none of them."""
        for ticket in [ticket for ticket in self._index if ticket not in tickets]:
            self.release(ticket)
        for number in list(self._numbers):
            self._delete_if_unused(number)

    def sync(self) -> None:
        """Force appended records to the disk."""
        for descriptor in self.take_unsynced():
            self._sync_file(descriptor)
            os.close(descriptor)

    def forget_finished(self) -> None:
        """Close full files without forcing them to the disk."""
        while self._finished:
            os.close(self._finished.pop())

    def close(self) -> None:
        self._finish_file()
        self.forget_finished()

    def _finish_file(self) -> None:
        if self._file is not None:
            self._finished.append(self._file)
            self._file = None

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.segment"

    def _begin_segment(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL
        file = os.open(self._path(self._active + 1), flags, 0o600)  # if it fails, the old one goes on
        self._finish_file()
        finished, self._active, self._offset, self._file = self._active, self._active + 1, 0, file
        self._numbers.append(self._active)
        sync_path(self._folder)
        self._delete_if_unused(finished)

    def _delete_if_unused(self, number: int) -> None:
        if number in self._numbers and number != self._active and self._num_live[number] <= 0:
            self._numbers.remove(number)
            del self._num_live[number]
            self._unneeded.append(number)
            if not self._keeps_unneeded:
                self.delete(self.unneeded())

    def unneeded(self) -> list[int]:
        """Return the numbers of files that are not needed and were not passed to `delete`."""
        return list(self._unneeded)

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete files that `unneeded` named."""
        for number in numbers:
            self._path(number).unlink(missing_ok=True)
            self._unneeded.remove(number)
            fault_point("buffer.deleting", number)

    def _remember(self, ticket: int, attempt: int, place: _Place) -> None:
        """Take in a record. The same attempt twice: its first record was never committed."""
        attempts = self._index.setdefault(ticket, {})
        older = attempts.get(attempt)
        attempts[attempt] = place
        self._num_live[place.segment] += 1
        if older is not None:
            self._forget(older)

    def _scan(self, number: int) -> None:
        """Index one file by its headers; cut a record that a killed process left half written."""
        path = self._path(number)
        size, end = path.stat().st_size, 0
        with path.open("r+b", buffering=0) as file:
            for offset, header in scan_records(file.fileno(), size):
                if offset > end:
                    self.counters["damaged_headers"] += 1
                num_bytes = HEADER_BYTES + header.body_bytes
                self._remember(header.ticket, header.attempt, _Place(number, offset, num_bytes))
                end = offset + num_bytes
            if end < size:
                self.counters["torn_tails"] += 1
                self.counters["torn_bytes"] += size - end
                file.truncate(end)


def scan_records(file: int, size: int) -> Iterator[tuple[int, RecordHeader]]:
    """Yield where each whole record of a file begins, and its header; nothing is changed.

    Args:
        file: A descriptor. size: How many bytes of it to look at.
    """
    offset = 0
    while offset < size:
        header = read_header(os.pread(file, HEADER_BYTES, offset))
        if header is not None and offset + HEADER_BYTES + header.body_bytes <= size:
            yield offset, header
            offset += HEADER_BYTES + header.body_bytes
            continue
        found = _find_record(file, offset + 1, size)
        if found is None:
            return
        offset = found


def _find_record(file: int, offset: int, size: int) -> int | None:
    """Return where the next whole record begins, behind a header that is damaged; None at a torn tail."""
    data = os.pread(file, size - offset, offset)
    at = data.find(MAGIC)
    while at >= 0:
        header = read_header(data[at : at + HEADER_BYTES])
        if header is not None and at + HEADER_BYTES + header.body_bytes <= len(data):
            return offset + at
        at = data.find(MAGIC, at + 1)
    return None


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
