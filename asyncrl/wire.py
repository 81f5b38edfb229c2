"""Messages between services: one msgpack header and raw frames.

Owns the header's form and its limits. Nothing that arrives is ever executed: headers hold plain
values, frames hold bytes, and both are checked before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from asyncrl.errors import WireError

SCHEMA_VERSION = 1
MAX_HEADER_BYTES = 4 << 20
MAX_FRAME_BYTES = 1 << 30

Frame = bytes | bytearray | memoryview


def pack_header(fields: Mapping[str, Any]) -> bytes:
    """Return `fields` as msgpack, stamped with the schema version."""
    return bytes(msgpack.packb({"v": SCHEMA_VERSION, **fields}, use_bin_type=True))


def unpack_header(data: Frame) -> dict[str, Any]:
    """Return the fields of a header.

    Raises:
        WireError: The bytes are no msgpack map of this schema version, or are too long.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise WireError(f"a header of {len(data)} bytes is over the limit of {MAX_HEADER_BYTES}")
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a header is not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise WireError(f"a header must be a map, not {type(fields).__name__}")
    if fields.get("v") != SCHEMA_VERSION:
        raise WireError(
            f"a header has schema version {fields.get('v')!r}, this process speaks {SCHEMA_VERSION}",
            hint="Run the same asyncrl version on both sides",
        )
    return fields


def field(fields: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """Return `fields[name]`, checked to be of `kind`; `bool` does not pass for `int`.

    Raises:
        WireError: The field is missing or of another type.
    """
    if name not in fields:
        raise WireError(f"the field '{name}' is missing")
    value = fields[name]
    is_bool_for_number = isinstance(value, bool) and kind is not bool
    if is_bool_for_number or not isinstance(value, kind):
        raise WireError(f"the field '{name}' is a {type(value).__name__}, wanted {kind}")
    return value
