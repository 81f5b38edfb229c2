"""The limits of a header, each at its edge."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from asyncrl.core import wire
from asyncrl.core.errors import WireError


def packed(value: Any) -> bytes:
    return wire.pack_header({"value": value})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_plain_values_come_back_as_they_were() -> None:
    value = {"a": [1, -1, 1.5, None, True, "é", b"\xff", [], {}], "b": {"c": [[0]]}}
    assert wire.unpack_header(packed(value))["value"] == value


def test_a_header_may_be_nested_to_the_limit_and_no_deeper() -> None:
    wire.unpack_header(packed(nested(wire.MAX_DEPTH - 1)))
    with pytest.raises(WireError, match="nested deeper"):
        wire.unpack_header(packed(nested(wire.MAX_DEPTH)))


def test_a_header_may_be_as_long_as_its_reader_says_and_no_longer() -> None:
    data = packed("x" * 100)
    wire.unpack_header(data, len(data))
    with pytest.raises(WireError, match="over the limit"):
        wire.unpack_header(data, len(data) - 1)


@pytest.mark.parametrize(
    "value", [msgpack.ExtType(5, b"x"), msgpack.ExtType(5, b""), msgpack.Timestamp(1, 1)]
)
def test_types_of_their_own_are_refused(value: Any) -> None:
    with pytest.raises(WireError):
        wire.unpack_header(packed([value]))


def test_a_list_of_too_many_items_is_refused() -> None:
    data = packed([0] * (wire.MAX_ITEMS + 1))
    assert len(data) < wire.MAX_HEADER_BYTES
    with pytest.raises(WireError, match="max_array_len"):
        wire.unpack_header(data)


@pytest.mark.parametrize("version", [0, 2, "1", None, True, float("nan"), [1], {"v": 1}])
def test_a_schema_of_another_version_is_refused_with_advice(version: Any) -> None:
    with pytest.raises(WireError, match="Run the same asyncrl version"):
        wire.unpack_header(msgpack.packb({"v": version}))


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, 1 << 64])
def test_what_msgpack_cannot_hold_is_a_typed_error(value: Any) -> None:
    with pytest.raises(WireError, match="cannot be packed"):
        packed(value)
