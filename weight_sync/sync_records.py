"""Records of weight sync, as they stand in the `weight_sync.jsonl` of a run: a struct per kind (pure).

The coordinator (`weight_sync.coordination.journal`) writes them; `asyncrl inspect weights` and the trace read
them. A line is an entry as JSON, told apart by its `kind`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from asyncrl.core.status.service import MemberStatus

JOURNAL_FILE = "weight_sync.jsonl"


class _Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Attributes: `time` of the writing, in seconds since the epoch; 0 before it."""

    time: float = 0.0


class StartRecord(_Entry, frozen=True, tag="start"):
    """A coordinator with this fencing token has begun."""

    token: int


class RoundRecord(_Entry, frozen=True, tag="round"):
    """One closed round.

    Attributes:
        number, step: Of the version; digest, version_bytes: as far as the coordinator still knew them.
        parts: State of each member at the end, by name.
        seconds: From the offer to the end.
        num_bytes: That the publisher sent, once for all members.
        cause: Cause of its failure; empty without one.
        causes: Cause of failure by member.
        culprits: Members to which the failure is attributed.
        holder: Process whose copy the members have mapped; empty if it was sent.
        stripe: Of the version, that was sent.
    """

    round: int
    lane: str
    number: int
    step: int
    membership: int
    parts: Mapping[str, str]
    seconds: float
    num_bytes: int
    cause: str
    causes: Mapping[str, str]
    culprits: Sequence[str]
    digest: str = ""
    version_bytes: int = 0
    holder: str = ""
    stripe: int = 0


class BlameRecord(_Entry, frozen=True, tag="blame"):
    """A peer was found to be the cause of a failure; `number` is the newest version at the time."""

    culprit: str
    cause: str
    number: int


class LoadFailureRecord(_Entry, frozen=True, tag="load_failure"):
    """An engine did not load version `number`, whose bytes had been verified beside it."""

    member: str
    number: int
    error: str


class MembersRecord(_Entry, frozen=True, tag="members"):
    """The newest version, as (number, step), and what was known of each member, but for its silence."""

    version: tuple[int, int] | None
    members: Mapping[str, MemberStatus]


class FencesRecord(_Entry, frozen=True, tag="fences"):
    """Members that take no leases before they serve the given version number."""

    fences: Mapping[str, int]


Record = RoundRecord | BlameRecord | LoadFailureRecord
"""Records of the protocol; the others are of the coordinator."""
Entry = Record | StartRecord | MembersRecord | FencesRecord
_decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


def parse_entry(line: bytes) -> Entry | None:
    """Return the entry of a line, None of a torn one or one of an unknown kind."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None
