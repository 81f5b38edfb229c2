"""Reference model of a ledger: its invariants, checked by other means than its own.

The model knows weights by their history: the groups that each step trained. Two versions with one
history have the same weights; where histories part, their lineages fork. From that it computes lag,
and the groups that a learner may train, without the ledger's book of versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from asyncrl.buffer.ledger.census import add_up, take_census
from asyncrl.buffer.ledger.events import Event, pack, unpack
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import LedgerSettings, State, Ticket
from asyncrl.core.errors import AsyncrlError

Trace = tuple[Any, ...]
"""What one step trained: equal traces on equal weights make equal weights."""


@dataclass
class Model:
    """The learner's weights, the versions' histories and the tokens of every attempt.

    Attributes:
        trunk: The traces of the current lineage's steps. booked: The tickets that each trained.
        histories: Version number -> the trunk that it was published from.
        tokens: (ticket, attempt) -> the versions that sampled its tokens, rising.
        replayed: Step -> tickets that must be reserved for it again.
        branch, branched_at: Which learning rate trains, and the step from which it does.
    """

    trunk: list[Trace] = field(default_factory=list)
    booked: list[list[int]] = field(default_factory=list)
    histories: dict[int, tuple[Trace, ...]] = field(default_factory=dict)
    tokens: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    replayed: dict[int, list[int]] = field(default_factory=dict)
    branch: int = 0
    branched_at: int = 0
    num_salts: int = 0

    def true_step(self, number: int) -> int:
        """Return the step to subtract for a token of this version: down to the fork and up again."""
        history, fork = self.histories[number], 0
        for ours, theirs in zip(self.trunk, history, strict=False):
            if ours != theirs:
                break
            fork += 1
        is_one_line = fork in (len(self.trunk), len(history))
        return len(history) if is_one_line else 2 * fork - len(history)

    def trace(self, batch: Sequence[Ticket], gone: Sequence[int] = ()) -> Trace:
        """Return what a step over `batch`, less the `gone` tickets, makes of the weights."""
        return (self.branch, *((one.id, one.attempt) for one in batch if one.id not in gone))

    def salt(self) -> Trace:
        """Return a trace like no other: an update that will not happen the same way again."""
        self.num_salts += 1
        return ("salt", self.num_salts)

    def go_back(self, step: int, is_exact: bool) -> None:
        """Rewind to `step`; what was trained from there on is to come again unless a payload is lost."""
        again = {at: tickets for at, tickets in enumerate(self.booked) if at >= step and tickets}
        older = {at: tickets for at, tickets in self.replayed.items() if at >= step}
        self.replayed = {**older, **again} if is_exact else {}
        self.trunk, self.booked = self.trunk[:step], self.booked[:step]

    def begin_branch(self, step: int) -> None:
        """From `step` on the learner trains otherwise than ever before."""
        self.branch, self.branched_at = self.branch + 1, step

    def lags(self, ledger: Ledger, ticket: Ticket, step: int) -> list[tuple[int, int]]:
        """Return (lag that the learner computes, true lag) of each version in a group."""
        counted = dict(ledger.counted_versions([ticket]))
        versions = self.tokens[ticket.id, ticket.attempt]
        return [(step - counted[number], step - self.true_step(number)) for number in versions]


@dataclass
class Shadow:
    """Another ledger, fed with the journalled events only; and the events, for replays.

    Attributes:
        snapshots: (number of events before it, packed snapshot).
    """

    settings: LedgerSettings
    state: LedgerState
    events: list[Event] = field(default_factory=list)
    snapshots: list[tuple[int, bytes]] = field(default_factory=list)

    def follow(self, ledger: Ledger) -> None:
        """Take the ledger's events in, as a journal would give them back."""
        for event in ledger.drain_events():
            read = unpack(msgpack.unpackb(msgpack.packb(pack(event))))
            assert read == event
            self.events.append(read)
            self.state.apply(read)

    def take_snapshot(self, ledger: Ledger) -> None:
        self.follow(ledger)
        self.snapshots.append((len(self.events), msgpack.packb(ledger.state.as_snapshot())))

    def recover(self, num_snapshots: int) -> Ledger:
        """Return the ledger that a restarted buffer reads: from a snapshot (0: none) and what follows."""
        if not num_snapshots or not self.snapshots:
            return Ledger.replay(self.settings, self.events)
        num_events, packed = self.snapshots[-num_snapshots % len(self.snapshots)]
        snapshot = msgpack.unpackb(packed, strict_map_key=False)
        return Ledger.replay(self.settings, self.events[num_events:], snapshot)


def clone(ledger: Ledger) -> Ledger:
    """Return a ledger of its own in the same state, by way of a snapshot."""
    packed = msgpack.packb(ledger.state.as_snapshot())
    copy = Ledger.replay(ledger.settings, [], msgpack.unpackb(packed, strict_map_key=False))
    copy.max_lag = ledger.max_lag
    return copy


def check_refused(ledger: Ledger, error: type[AsyncrlError], call: Callable[[], object]) -> None:
    """Check that the call raises and leaves everything as it was."""
    before, ids = ledger.state.as_snapshot(), list(ledger.state.freed)
    with pytest.raises(error):
        call()
    assert ledger.state.as_snapshot() == before and ledger.state.freed == ids
    assert ledger.drain_events() == [], "a refused command emits nothing"


def check_indexes(ledger: Ledger) -> None:
    """Check everything that is kept twice, against a recount from the tickets."""
    state = ledger.state
    tickets = state.tickets.values()
    by_state: dict[State, list[int]] = {one: [] for one in State}
    for ticket in tickets:
        by_state[ticket.state].append(ticket.id)
    assert state.counts == {one: len(ids) for one, ids in by_state.items()}
    assert sorted(state.issued_heap) == sorted(by_state[State.ISSUED])
    assert state.stored == set(by_state[State.STORED])
    leased = {(ticket.replica, ticket.id) for ticket in tickets if ticket.state is State.LEASED}
    assert leased == {(replica, number) for replica, held in state.leases.items() for number in held}
    if ledger.settings.policy == "wait":
        by_version = [number for held in state.leased_by_version.values() for number in held]
        assert sorted(by_state[State.LEASED]) == sorted(by_version)
    partial = sum(ticket.partial.num_bytes for ticket in tickets if ticket.partial)
    groups = sum(ticket.num_bytes for ticket in tickets if ticket.is_held)
    assert (state.partial_bytes, state.held_bytes) == (partial, partial + groups)
    assert state.memory_bytes <= ledger.settings.memory_bytes
    assert take_census(state).residue == 0
    assert add_up(state) == take_census(state)


def drive_to_next_step(ledger: Ledger, token: int, now: float) -> int:
    """Let a willing replica and learner work on a copy until a step is trained; return the rounds.

    Whoever holds a lease otherwise never speaks again.
    """
    copy = clone(ledger)
    if not copy.state.is_resumed:
        token = copy.open("willing")
        copy.resume(token, max(copy.state.checkpoints, default=0))
    step, settings = copy.state.steps_trained, copy.settings
    version = copy.register_version(token, step)
    limit = settings.groups_per_step + 2
    for num_rounds in range(limit):
        if copy.reserve(token, step, now) is not None:
            copy.trained(token, step)
            return num_rounds
        now += max(settings.lease_s, settings.max_wait_s) + 1.0
        copy.expire(now)
        for grant in copy.lease("willing", version, 1, now):
            copy.store(grant.ticket, 10, settings.max_group_bytes, (version, version))
    raise AssertionError(f"step {step} is never trained: {take_census(copy.state)}")
