"""Every request and answer of every service: what is not of its form is refused, and crashes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from asyncrl.buffer import messages as buffer
from asyncrl.core import wire
from asyncrl.core.errors import WireError
from asyncrl.core.rpc.message import Message, Operation, fields_of, read_message
from weight_sync import messages as weights
from weight_sync.protocol import messages as coordination

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, (1 << 63) - 1, 0.5, -1e300, float("nan"), float("inf"), b"a"),
    *("", "a", "x" * 5000, "publisher", "receiver.0", "READY"),
    *([], [1], [1, 1], [[1, 1]], [1, 0.5, 0.5, 1], ["a"], [{}], {}, {"a": 1}, {"accuracy": 0.5}),
    *({"accuracy": [1, 0.5, 0.5, 1]}, {"accuracy": [1, float("inf"), 0.5, 1]}, {"accuracy": "a"}),
)


def operations() -> Iterator[Any]:
    for module in (buffer, weights, coordination):
        for name, found in vars(module).items():
            if isinstance(found, Operation):
                yield pytest.param(found, id=f"{module.__name__}.{name}")


def structs(module: Any) -> list[type[Message]]:
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Message)]
    return [one for one in found if one.__module__ == module.__name__]


def read(fields: dict[str, Any], kind: type[Message]) -> Message | None:
    """Return the struct, None if it is refused as what arrives is refused."""
    try:
        found = read_message(fields, kind, "op")
        if isinstance(found, buffer.Evaluated):
            found.tallies()
        return found
    except WireError:
        return None


@pytest.mark.parametrize("module", [buffer, weights, coordination], ids=lambda module: module.__name__)
def test_no_value_in_any_field_of_any_struct_ends_the_process(module: Any) -> None:
    """msgspec 0.22 has types that do (docs/adr/0009); a crash of this test is one of them."""
    num_taken = num_refused = 0
    for kind in structs(module):
        fields = msgspec.structs.fields(kind)
        honest = {one.encode_name: next(v for v in VALUES if is_of(v, one.type)) for one in fields}
        for name in honest:
            for value in VALUES:
                is_taken = read(honest | {name: value}, kind) is not None
                num_taken, num_refused = num_taken + is_taken, num_refused + (not is_taken)
    assert num_taken > 100 and num_refused > 500


def is_of(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize("operation", list(operations()))
def test_a_field_that_an_operation_does_not_have_is_refused_by_name(operation: Operation[Any, Any]) -> None:
    for kind in (operation.request, operation.answer):
        fields = {one.encode_name: 1 for one in msgspec.structs.fields(kind)}
        with pytest.raises(WireError, match=rf"'{operation.name}'.*(unknown field `odd`|Expected)"):
            read_message({"odd": 1, **fields}, kind, operation.name)


def test_a_lease_comes_over_the_wire_as_it_was_given() -> None:
    grants = (buffer.LeaseGrant(1, 2, 0, 3, 4, 5, 6.0), buffer.LeaseGrant(7, 1, 1, 0, 2, 9, 6.0, 1))
    reply = buffer.LeaseReply(grants, buffer.EvaluationOrder(1, 2, 0, 3))
    assert fields_of(reply)["grants"][0]["pass"] == 3
    assert read_message(fields_of(reply), buffer.LeaseReply, "lease") == reply


@pytest.mark.parametrize("levels", [wire.MAX_DEPTH, 1000, 200_000])
@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
def test_bytes_that_are_nested_beyond_the_stack_are_refused_as_others_are(opener: bytes, levels: int) -> None:
    header = b"\x82\xa1v\x02\xa5where" + opener * levels + b"\xc0"
    with pytest.raises(WireError, match=r"nested deeper|is not msgpack"):
        read_message(wire.unpack_header(header, version=wire.RPC_VERSION), buffer.Lease, "lease")
