"""Reads payloads out of a journal at which a buffer may be at work, without changing anything.

A payload may go away while one looks: then it is not found, and nothing else happens. Files hold payloads
for longer than the buffer needs them, because they are deleted whole; what is still there is found.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from asyncrl.buffer.journals.payload_index import PayloadIndex
from asyncrl.buffer.journals.records import HEADER_BYTES, read_frames
from asyncrl.buffer.journals.redis.past import Ask
from asyncrl.buffer.journals.segments import scan_records
from asyncrl.core.wire import Frame

Key = tuple[int, int]
"""A ticket and an attempt."""
Payloads = Callable[[Collection[Key]], Mapping[Key, Sequence[Frame]]]
"""Returns the frames of those payloads that are there and undamaged."""


def payloads_in_files(folder: Path) -> Payloads:
    """Return what finds payloads in the segments of a file journal, the newest file first."""

    def find(wanted: Collection[Key]) -> dict[Key, list[bytes]]:
        missing = set(wanted)
        found: dict[Key, list[bytes]] = {}
        for path in sorted(folder.glob("*.segment"), reverse=True):
            if not missing:
                break
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                here = _read_segment(path, missing)
                found.update(here)
                missing -= here.keys()
        return found

    return find


def _read_segment(path: Path, wanted: Collection[Key]) -> dict[Key, list[bytes]]:
    """Return the wanted payloads of one file; of two records of one attempt the later counts."""
    found: dict[Key, list[bytes]] = {}
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


def payloads_in_redis(ask: Ask, key: str) -> Payloads:
    """Return what finds payloads in the hash `key` of a Redis that `ask` reaches."""

    def find(wanted: Collection[Key]) -> dict[Key, list[bytes]]:
        index = PayloadIndex(ask("HKEYS", key))
        found: dict[Key, list[bytes]] = {}
        for ticket, attempt in wanted:
            name = index.find(ticket, attempt)
            record = None if name is None else ask("HGET", key, name)
            frames = None if record is None else read_frames(record, ticket, attempt)
            if frames is not None:
                found[ticket, attempt] = frames
        return found

    return find
