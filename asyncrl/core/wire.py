"""Messages between services: one msgpack header and raw frames.

Owns the header's form and its limits: bytes, depth, lengths, kinds of values. Nothing that arrives is
ever executed: headers hold plain values, frames hold bytes, and both are checked before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from asyncrl.core.errors import WireError, WrongVersion

SCHEMA_VERSION = 1
"""Of what is stored: groups in journals, records."""
RPC_VERSION = 4
"""Of requests and replies. 2: each operation's struct says what it takes and gives (`core.rpc.message`).
3: names of fields in weight sync's hellos, polls and pins."""
MAX_HEADER_BYTES = 4 << 20
"""Of a reply, or of a group."""
MAX_REQUEST_BYTES = 256 << 10
"""Of a request's header. 256 KiB of empty maps take 18 MB once read; 4 MiB took 291."""
MAX_FRAME_BYTES = 1 << 30
MAX_DEPTH = 6
MAX_ITEMS = 1 << 17
"""Of one list or map. The longest honest one is the list of tickets of a batch."""

Frame = bytes | bytearray | memoryview

_PLAIN = frozenset((int, str, float, bool, bytes, type(None)))


def pack_header(fields: Mapping[str, Any], version: int = SCHEMA_VERSION) -> bytes:
    """Return `fields` as msgpack, stamped with the schema version.

    Raises:
        WireError: A text has no UTF-8 (a lone surrogate, as JSON's escapes can make), or a number has
            more than 64 bits.
    """
    try:
        return bytes(msgpack.packb({"v": version, **fields}, use_bin_type=True))
    except (ValueError, OverflowError) as error:
        raise WireError(f"a header cannot be packed: {str(error)!a}") from error


def unpack_header(
    data: Frame, max_bytes: int = MAX_HEADER_BYTES, version: int = SCHEMA_VERSION
) -> dict[str, Any]:
    """Return the fields of a header, see `unpack_map`.

    Raises:
        WireError: As `unpack_map`.
        WrongVersion: The header is of another schema version.
    """
    fields = unpack_map(data, "header", max_bytes)
    found = fields.get("v")
    if type(found) is not int or found != version:
        raise WrongVersion(
            f"a header has schema version {str(found)[:20]}, this process speaks {version}",
            hint="Run the same asyncrl version on both sides",
        )
    return fields


def unpack_map(data: Frame, what: str, max_bytes: int) -> dict[str, Any]:
    """Return a map of numbers, text, bytes, None, and lists and maps of them; `what` names it in errors.

    Raises:
        WireError: The bytes are no msgpack map, are too long, are nested deeper than `MAX_DEPTH`, or hold
            a longer list than `MAX_ITEMS` or anything else.
    """
    if len(data) > max_bytes:
        raise WireError(f"a {what} of {len(data)} bytes is over the limit of {max_bytes}")
    try:
        fields = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a {what} is not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise WireError(f"a {what} must be a map, not {type(fields).__name__}")
    _check_plain(fields, MAX_DEPTH, what)
    return fields


def _check_plain(value: dict[str, Any] | list[Any], depth: int, what: str) -> None:
    for item in value.values() if isinstance(value, dict) else value:
        kind = type(item)
        if kind in _PLAIN:
            continue
        if kind is not dict and kind is not list:
            raise WireError(f"a {what} holds a {kind.__name__}, which is not a plain value")
        if depth <= 1:
            raise WireError(f"a {what} is nested deeper than {MAX_DEPTH}")
        _check_plain(item, depth - 1, what)


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


def texts(header: Mapping[str, object], name: str, length: int, max_chars: int) -> list[str]:
    """Return `length` short texts, empty ones where the header lacks them. Raises WireError."""
    if name not in header:
        return [""] * length
    found: list[object] = field(header, name, list)
    kept = [one for one in found if isinstance(one, str) and len(one) <= max_chars and one.isprintable()]
    if len(found) != length or len(kept) != length:
        raise WireError(f"the field '{name}' must hold {length} printable texts of up to {max_chars} chars")
    return kept
