"""The form of a stored payload: a header that can be read alone, and a body with its own checksum.

Owns the layout, for files and for Redis alike. Invariant: `read_frames` returns what `make_record` was
given, or nothing; a header tells how long its body is without the body being read.

    record = magic, ticket, attempt, body length, body digest, header digest | body
    body   = number of frames, their lengths | frames
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from asyncrl.core.errors import WireError
from asyncrl.core.experience import Group, decode_group
from asyncrl.core.wire import Frame

MAGIC = b"AXP1"
_FIELDS = struct.Struct("<4sQIQQ")
_DIGEST = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _DIGEST.size
TURNS_FROM = 1 << 24
"""Attempt under which a ticket's first record of turns is stored, the next ones above; groups are below."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Header before a body."""

    ticket: int
    attempt: int
    body_bytes: int
    body_digest: int


def make_record(ticket: int, attempt: int, frames: Sequence[Frame]) -> bytes:
    """Return the record of one payload."""
    head = struct.pack(f"<I{len(frames)}Q", len(frames), *map(len, frames))
    digest = xxhash.xxh3_64(head)
    for frame in frames:
        digest.update(frame)
    body_bytes = len(head) + sum(map(len, frames))
    fields = _FIELDS.pack(MAGIC, ticket, attempt, body_bytes, digest.intdigest())
    return b"".join([fields, _DIGEST.pack(xxhash.xxh3_64_intdigest(fields)), head, *frames])


def read_header(head: bytes) -> RecordHeader | None:
    """Return the header that `head` begins with, or None if that is no valid one."""
    if len(head) < HEADER_BYTES:
        return None
    fields = head[: _FIELDS.size]
    (digest,) = _DIGEST.unpack(head[_FIELDS.size : HEADER_BYTES])
    magic, ticket, attempt, body_bytes, body_digest = _FIELDS.unpack(fields)
    if magic != MAGIC or digest != xxhash.xxh3_64_intdigest(fields):
        return None
    return RecordHeader(ticket, attempt, body_bytes, body_digest)


def read_frames(record: bytes, ticket: int, attempt: int) -> list[bytes] | None:
    """Return the frames of a record, or None if a bit of it changed or it is another payload's."""
    header = read_header(record)
    body = memoryview(record)[HEADER_BYTES:]
    if header is None or (header.ticket, header.attempt) != (ticket, attempt):
        return None
    if len(body) != header.body_bytes or xxhash.xxh3_64_intdigest(body) != header.body_digest:
        return None
    (num_frames,) = struct.unpack_from("<I", body)
    lengths = struct.unpack_from(f"<{num_frames}Q", body, 4)
    offset, frames = 4 + 8 * num_frames, []
    for length in lengths:
        frames.append(bytes(body[offset : offset + length]))
        offset += length
    return frames


def read_group(record: bytes, ticket: int, attempt: int) -> Group | None:
    """Return the group of a stored record, None if it is damaged or of an older asyncrl."""
    frames = read_frames(record, ticket, attempt)
    try:
        return None if frames is None else decode_group(frames)
    except WireError:
        return None
