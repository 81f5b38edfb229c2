"""What a peer says of itself to the coordinator, checked where it arrives (pure).

Invariant: what the coordinator keeps of its peers is bounded. There is one publisher, receivers are numbered
below `MAX_MEMBERS`, and no text is longer than `MAX_TEXT`.
"""

from __future__ import annotations

import re
from typing import Any

from asyncrl.errors import WireError
from asyncrl.versions import UNLOADED
from asyncrl.wire import field
from weight_sync.protocol.members import Card, PublisherSeat
from weight_sync.protocol.protocol import PUBLISHER

MAX_MEMBERS = 4096
MAX_TEXT = 200
"""Characters of a name or an address; further ones of a reason are cut."""
MAX_ABILITIES = 16
RECEIVER = re.compile(r"receiver\.(0|[1-9][0-9]{0,3})")


def read_name(args: dict[str, Any]) -> str:
    """Return the peer's name.

    Raises:
        WireError: It is no name of a publisher or a receiver.
    """
    name = read_text(args, "name")
    found = RECEIVER.fullmatch(name)
    if name != PUBLISHER and (found is None or int(found[1]) >= MAX_MEMBERS):
        raise WireError(f"'{name}' is neither '{PUBLISHER}' nor 'receiver.<n>' with n below {MAX_MEMBERS}")
    return name


def read_text(args: dict[str, Any], name: str) -> str:
    """Return a text that is kept. Raises WireError if it is too long."""
    text = str(field(args, name, str))
    if len(text) > MAX_TEXT:
        raise WireError(f"the field '{name}' has {len(text)} characters, allowed are {MAX_TEXT}")
    return text


def read_reason(fields: dict[str, Any], name: str) -> str:
    """Return a text for people, its beginning if it is long."""
    return str(field(fields, name, str))[:MAX_TEXT]


def read_optional(fields: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """Return a field that older peers leave out."""
    return field(fields, name, kind) if name in fields else default


def read_seat(args: dict[str, Any], now: float) -> PublisherSeat:
    """Return what a publisher says of itself in its hello."""
    return PublisherSeat(
        read_text(args, "incarnation"),
        _read_abilities(args),
        read_text(args, "store_host"),
        field(args, "store_port", int),
        now,
        born=read_optional(args, "born", int, 0),
    )


def read_card(args: dict[str, Any]) -> Card:
    """Return what a receiver says of itself in its hello."""
    return Card(
        read_name(args),
        read_text(args, "incarnation"),
        _read_abilities(args),
        serving=field(args, "serving", int),
        staged=field(args, "staged", int),
        is_attended=field(args, "attended", bool),
        is_pinned=field(args, "pinned", bool),
        is_draining=read_optional(args, "draining", bool, False),
        born=read_optional(args, "born", int, 0),
        base=read_optional(args, "base", int, UNLOADED),
    )


def _read_abilities(args: dict[str, Any]) -> frozenset[str]:
    values = field(args, "abilities", list)
    if len(values) > MAX_ABILITIES or not all(
        isinstance(one, str) and len(one) <= MAX_TEXT for one in values
    ):
        raise WireError(f"the field 'abilities' holds up to {MAX_ABILITIES} names of backends")
    return frozenset(values)
