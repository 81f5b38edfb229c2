"""Reader of payloads in the segments of a file journal, which a live buffer may be writing.

A payload that is deleted during the read is not found. Segments hold payloads for longer than the buffer
needs them, because a segment is deleted whole; such payloads are still found.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from asyncrl.buffer.journals.kind import NUM_NEWEST, PayloadKey
from asyncrl.buffer.journals.records import HEADER_BYTES, TURNS_FROM, read_frames, read_group, read_header
from asyncrl.buffer.journals.segments import scan_records
from asyncrl.core.experience import Group
from asyncrl.core.wire import Frame

NUM_SEGMENTS = 2
"""The newest files that the first look goes through; they are of 64 MiB."""


class SegmentPayloads:
    """Payloads in the segments of a file journal."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._offset = 0
        self._places: deque[tuple[Path, int, int, int, int]] = deque(maxlen=NUM_NEWEST)

    def find(self, wanted: Collection[PayloadKey]) -> Mapping[PayloadKey, Sequence[Frame]]:
        """Return the wanted payloads that are there; the newest file is looked through first."""
        missing = set(wanted)
        found: dict[PayloadKey, list[bytes]] = {}
        for path in sorted(self._folder.glob("*.segment"), reverse=True):
            if not missing:
                break
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                here = _read_segment(path, missing)
                found.update(here)
                missing -= here.keys()
        return found

    def newest(self) -> list[Group]:
        """Return the newest groups, the newest first. It goes on where it stopped."""
        paths = sorted(self._folder.glob("*.segment"))
        for path in paths[-NUM_SEGMENTS:] if self._path is None else paths:
            if self._path is None or path > self._path:
                self._path, self._offset = path, 0
            if path == self._path:
                with contextlib.suppress(FileNotFoundError):  # nobody needs that segment any more
                    self._scan(path)
        groups = (self._read(*place) for place in reversed(self._places))
        return [group for group in groups if group is not None]

    def _scan(self, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            while (header := read_header(os.pread(file.fileno(), HEADER_BYTES, self._offset))) is not None:
                num_bytes = HEADER_BYTES + header.body_bytes
                if header.attempt < TURNS_FROM:
                    self._places.append((path, self._offset, num_bytes, header.ticket, header.attempt))
                self._offset += num_bytes

    def _read(self, path: Path, offset: int, num_bytes: int, ticket: int, attempt: int) -> Group | None:
        try:
            with path.open("rb", buffering=0) as file:
                record = os.pread(file.fileno(), num_bytes, offset)
        except FileNotFoundError:  # nobody needs that segment any more
            return None
        return read_group(record, ticket, attempt)


def _read_segment(path: Path, wanted: Collection[PayloadKey]) -> dict[PayloadKey, list[bytes]]:
    """Return the wanted payloads of one file; of two records of one attempt the later counts."""
    found: dict[PayloadKey, list[bytes]] = {}
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        for offset, header in scan_records(descriptor, os.fstat(descriptor).st_size):
            key = header.ticket, header.attempt
            if key not in wanted:
                continue
            record = os.pread(descriptor, HEADER_BYTES + header.body_bytes, offset)
            frames = read_frames(record, *key)
            if frames is not None:
                found[key] = frames
    return found
