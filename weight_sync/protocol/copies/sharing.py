"""Sharing of copies within a node: which members map a version there, and which of them it is sent to (pure).

Processes with the same node's mark see the same shared memory. A version is sent to at most one member of a
node at a time; the others map its verified copy, and those beside a publisher map the publisher's segment.
Who waits for a copy is written down nowhere: if the member that receives it fails, the next look at the
members sends the version to another one.
Invariant: a member that cannot map the segments of a process is not asked to again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weight_sync.protocol.lanes.stripes import PUBLISHER
from weight_sync.protocol.members import Member
from weight_sync.protocol.rounds import ABORTED, SUPERSEDED, Lane, Part, Round
from weight_sync.protocol.state import CoordinationState

UNMAPPABLE = "unmappable"
"""Cause of a member that cannot map what another process of its node shares."""
SHARED_LANES = (Lane.MAIN, Lane.JOINERS, Lane.FOLDER)
"""Lanes whose copies others of the node wait for."""
RECEIVING = (Part.OFFERED, Part.ACCEPTED, Part.RECEIVING)


@dataclass(frozen=True)
class Holder:
    """A process that shares the newest version: its segment has the name `path`."""

    name: str
    incarnation: str
    path: str


class CopySharing:
    """See the module."""

    def __init__(self, state: CoordinationState) -> None:
        self._state = state

    def find_mappers(self, members: Sequence[Member]) -> dict[Holder, list[Member]]:
        """Return those of `members` that can map the newest version now, by the process that has it."""
        holders: defaultdict[str, list[Holder]] = defaultdict(list)
        for node, holder in self._find_holders() if members else ():
            holders[node].append(holder)
        found: dict[Holder, list[Member]] = {}
        for member in members:
            able = (one for one in holders[member.node] if self._may_map(member, one.incarnation))
            if (nearest := next(able, None)) is not None:
                found.setdefault(nearest, []).append(member)
        return found

    def choose_receivers(self, members: Sequence[Member], rounds: Iterable[Round]) -> list[Member]:
        """Return those of `members` to send the newest version to: one of each node.

        Args:
            rounds: Under way. Nobody waits for the copy of a member that is served alone.
        """
        receiving: defaultdict[str, list[Member]] = defaultdict(list)
        for round_ in rounds if members else ():
            if round_.lane in SHARED_LANES and round_.version == self._state.current:
                for name in round_.those(*RECEIVING):
                    receiving[self._state.members[name].node].append(self._state.members[name])
        found = []
        for member in members:
            mates = receiving[member.node] if member.node else []
            if not any(self._may_map(member, mate.incarnation) for mate in mates):
                receiving[member.node].append(member)
                found.append(member)
        return found

    def note_failure(self, member: Member, round_: Round, cause: str) -> Part:
        """Note that the member has not mapped the round's version; return its part in the round.

        It gets the version in another way, and all later ones if it cannot map what that process shares.
        """
        member.last_error = round_.causes[member.name] = cause
        if cause == ABORTED:
            return Part.LEFT
        is_able = cause.partition(":")[0] != UNMAPPABLE
        member.not_mapped[round_.holder_incarnation] = round_.version.number if is_able else math.inf
        if cause == SUPERSEDED:
            return Part.LEFT
        self._state.counters["maps_failed"] += 1
        return Part.FAILED

    def _may_map(self, member: Member, incarnation: str) -> bool:
        current = self._state.current
        assert current is not None, "there is a version to map"
        return member.not_mapped.get(incarnation, 0) < current.number

    def _find_holders(self) -> Iterator[tuple[str, Holder]]:
        """Yield the processes that share the newest version, each with its node."""
        state = self._state
        assert state.current is not None, "there is a version to map"
        if state.publisher is not None and state.publisher.node and state.publisher.path:
            yield state.publisher.node, Holder(PUBLISHER, state.publisher.incarnation, state.publisher.path)
        for one in state.members.values():
            if one.node and one.is_listening and one.shared == state.current.number:
                yield one.node, Holder(one.name, one.incarnation, one.shared_path)
