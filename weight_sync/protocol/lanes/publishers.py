"""The publishers, one for each stripe, and the version that all of them can send (pure).

Owns which process is the publisher of a stripe. Invariants: what is sent is the newest version that every
publisher has; its number only rises, and an older one is never sent again.
"""

from __future__ import annotations

from asyncrl.core.staleness import PolicyVersion
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.round_manager import RoundManager
from weight_sync.protocol.state import CoordinationState


class Publishers:
    """See the module."""

    def __init__(self, state: CoordinationState, rounds: RoundManager) -> None:
        self._state, self._rounds = state, rounds

    def join(
        self, publisher: PublisherInfo, current: PolicyVersion | None, now: float, num_bytes: int
    ) -> bool:
        """Take up a publisher, which has given up all rounds and groups; False if a newer one lives."""
        state, name = self._state, publisher.stripe.publisher
        known = state.publishers.get(name)
        is_same = known is not None and known.incarnation == publisher.incarnation
        is_older = known is not None and not is_same and publisher.started_ms < known.started_ms
        if is_older and known is not None and now - known.last_seen < state.timing.dead_s:
            state.counters["refused_hellos"] += 1
            return False
        state.forget_orders(name)
        state.publishers[name] = publisher
        if known is not None and is_same:
            publisher.newest = known.newest
        else:
            state.current = None
        cause = "another process has taken its place" if known is not None and not is_same else ""
        self._rounds.leave_publisher(name, cause, now)
        if current is not None:
            self.note(name, current, num_bytes, publisher.path)
        return True

    def leave(self, name: str, now: float) -> None:
        """The publisher ends in order."""
        self._state.current = None
        self._state.publishers.pop(name, None)
        self._rounds.leave_publisher(name, "", now)

    def note(self, name: str, version: PolicyVersion, num_bytes: int, path: str) -> None:
        """The publisher can send its stripe of `version`; `path` as in `Coordination.published`."""
        state, publisher = self._state, self._state.publishers.get(name)
        current = state.current
        if publisher is None or (current is not None and version.number <= current.number):
            return
        publisher.newest = version
        if {one.newest for one in state.senders} != {version}:
            return  # it is the newest once all publishers can send their stripes of it
        if version.number < state.newest_number:
            state.counters["old_versions"] += 1
            return
        if current is not None and current.number not in state.sent_numbers:
            state.counters["versions_skipped"] += 1
        state.current, state.newest_number, state.num_bytes = version, version.number, num_bytes
        state.lagging.update(state.members)
        publisher.path = path
        state.counters["versions_published"] += 1
