"""A peer's hello as the record that the coordinator keeps of it (pure)."""

from __future__ import annotations

from typing import TypeVar

from asyncrl.core.errors import WireError
from weight_sync.protocol.members import MemberInfo, PublisherInfo
from weight_sync.protocol.messages import Hello

T = TypeVar("T")


def seat_of(hello: Hello, now: float) -> PublisherInfo:
    """Return the publisher that says hello. Raises WireError if it leaves out where receivers meet it."""
    return PublisherInfo(
        hello.incarnation,
        frozenset(hello.abilities),
        _said("store_host", hello.store_host),
        _said("store_port", hello.store_port),
        now,
        born=hello.born,
    )


def member_info_of(hello: Hello) -> MemberInfo:
    """Return what a receiver says of itself. Raises WireError if it leaves out what it holds."""
    return MemberInfo(
        hello.name,
        hello.incarnation,
        frozenset(hello.abilities),
        serving=_said("serving", hello.serving),
        staged=_said("staged", hello.staged),
        is_attended=_said("attended", hello.attended),
        is_pinned=_said("pinned", hello.pinned),
        is_draining=hello.draining,
        born=hello.born,
        base=hello.base,
    )


def _said(name: str, value: T | None) -> T:
    if value is None:
        raise WireError(f"'hello': the field '{name}' is missing")
    return value
