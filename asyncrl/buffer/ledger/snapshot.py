"""The ledger's state as plain values, and back (pure).

Owns the form of a snapshot: what the events determine and nothing that follows from it, such as
indexes. Invariant: reading a written snapshot makes an equal state, whatever the state.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import astuple, fields
from typing import Any, TypeVar

from asyncrl.buffer.ledger.events import OLD_REASONS
from asyncrl.buffer.ledger.facts import Facts, VersionBook, VersionRun
from asyncrl.buffer.ledger.tickets import (
    Checkpoint,
    DropReason,
    Evaluation,
    PartialRollout,
    State,
    Ticket,
)
from asyncrl.core.errors import WireError
from asyncrl.core.metrics.tallies import Tally

SNAPSHOT_VERSION, READ_VERSIONS = 3, (1, 2, 3)
"""3 has the names of `_OLD_FIELDS` and `OLD_REASONS`; 2 has versions as runs; 1 had a row for each."""
_OLD_FIELDS = {"carry": "partial", "carry_bytes": "partial_bytes"}

_PLAIN = (
    *("num_prompts", "data_digest", "token", "holder", "is_resumed", "num_issued", "num_drawn"),
    *(
        "steps_trained",
        "paced_open_tickets",
        "acked_steps",
        "last_reserved",
        "floor_step",
        "held_bytes",
        "held_tokens",
        "partial_bytes",
    ),
    *("folded_trained", "folded_given_up", "num_evaluations"),
)
_MAPPINGS = ("replay_sizes", "note")
_COUNTERS = ("folded_dropped", "reissues")
_TICKET_FIELDS = tuple(field.name for field in fields(Ticket))
_STATE_AT, _REASON_AT = _TICKET_FIELDS.index("state"), _TICKET_FIELDS.index("reason")
_VERSIONS_AT, _PARTIAL_AT = _TICKET_FIELDS.index("versions"), _TICKET_FIELDS.index("partial")
_STATES = {state.value: state for state in State}

K = TypeVar("K")


def write_snapshot(state: Facts) -> dict[str, object]:
    """Return the state as numbers, texts, lists and maps; maps of numbers are lists of pairs."""
    book = state.versions
    return {
        "snapshot_version": SNAPSHOT_VERSION,
        "plain": {name: getattr(state, name) for name in _PLAIN},
        "sources": [list(one) for one in state.sources],
        "mappings": {name: _pairs(getattr(state, name)) for name in (*_MAPPINGS, *_COUNTERS)},
        "versions": {
            "runs": [list(run) for run in book.runs],
            "last_number": book.last_number,
            "forks": list(book.forks),
        },
        "ticket_fields": list(_TICKET_FIELDS),
        "tickets": [_write_ticket(ticket) for ticket in state.tickets.values()],
        "by_step": [[step, [ticket.id for ticket in batch]] for step, batch in state.by_step.items()],
        "parts": [[step, [list(part) for part in parts]] for step, parts in state.parts.items()],
        "dropped": [ticket.id for ticket in state.dropped],
        "refused_steps": sorted(state.refused_steps),
        "checkpoints": [list(astuple(one)) for one in state.checkpoints.values()],
        "evaluations": [
            [one.id, one.step, "", one.version, _pairs(one.metrics)] for one in state.evaluations.values()
        ],
        "evaluation_parts": [
            [one.id, one.num_parts, one.served, _pairs(one.holders), _write_results(one)]
            for one in state.evaluations.values()
        ],
    }


def _pairs(mapping: Mapping[K, object]) -> list[list[object]]:
    return [[key, value] for key, value in mapping.items()]


def _write_results(evaluation: Evaluation) -> list[list[object]]:
    return [
        [part, [[name, *tally] for name, tally in tallies.items()]]
        for part, tallies in evaluation.results.items()
    ]


def _write_ticket(ticket: Ticket) -> list[object]:
    row = [getattr(ticket, name) for name in _TICKET_FIELDS]
    row[_STATE_AT] = ticket.state.value
    row[_REASON_AT] = ticket.reason and ticket.reason.value
    row[_VERSIONS_AT] = list(ticket.versions)
    if ticket.partial is not None:
        *sizes, versions, num_records = ticket.partial
        row[_PARTIAL_AT] = [*sizes, list(versions), *([num_records] if num_records else [])]
    return row


def read_snapshot(state: Facts, values: Mapping[str, object]) -> None:
    """Fill a new state.

    Raises:
        WireError: The values are no snapshot of this version.
    """
    version = values.get("snapshot_version")
    if version not in READ_VERSIONS:
        raise WireError(f"a snapshot has version {version!r}, this process reads {READ_VERSIONS}")
    try:
        _read(state, values)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise WireError(f"a snapshot is not whole: {type(error).__name__}: {error}") from error


def _read(state: Facts, values: Mapping[str, Any]) -> None:
    plain = {_OLD_FIELDS.get(name, name): value for name, value in values["plain"].items()}
    for name in _PLAIN:
        setattr(state, name, plain[name])
    state.sources = tuple((count, weight) for count, weight in values.get("sources", ()))
    for name in _MAPPINGS:
        setattr(state, name, dict(values["mappings"][name]))
    for name in _COUNTERS:
        counts = getattr(state, name)
        for reason, count in values["mappings"][name]:
            counts[OLD_REASONS.get(reason, reason)] += count
    state.versions = _read_versions(values["versions"])
    if tuple(_OLD_FIELDS.get(name, name) for name in values["ticket_fields"]) != _TICKET_FIELDS:
        raise ValueError("its tickets have other fields")
    state.tickets = {row[0]: _read_ticket(row) for row in values["tickets"]}
    state.by_step = {step: [state.tickets[number] for number in batch] for step, batch in values["by_step"]}
    state.parts = {step: [tuple(part) for part in parts] for step, parts in values.get("parts", ())}
    state.dropped = deque(state.tickets[number] for number in values["dropped"])
    state.refused_steps = set(values["refused_steps"])
    found = [Checkpoint(*row) for row in values["checkpoints"]]
    state.checkpoints = {checkpoint.step: checkpoint for checkpoint in found}
    state.evaluations = {
        number: Evaluation(number, step, version=version, metrics=dict(metrics))
        for number, step, _, version, metrics in values["evaluations"]
    }
    for number, num_parts, served, holders, results in values.get("evaluation_parts", ()):
        evaluation = state.evaluations[number]
        evaluation.num_parts, evaluation.served, evaluation.holders = num_parts, served, dict(holders)
        for part, tallies in results:
            evaluation.results[part] = {row[0]: Tally(*row[1:]) for row in tallies}
    _index(state)


def _read_versions(values: Mapping[str, Any]) -> VersionBook:
    if "registered" in values:
        return _versions_of_each(values["registered"], list(values["forks"]))
    runs = [VersionRun(*run) for run in values["runs"]]
    return VersionBook(runs, values["last_number"], list(values["forks"]))


def _versions_of_each(rows: Iterable[tuple[int, int, int]], forks: list[int]) -> VersionBook:
    """Return the book of rows of (number, lineage, step), as an older asyncrl wrote them."""
    book = VersionBook()
    for number, lineage, step in rows:
        book.forks = forks[:lineage]
        book.register(number, step)
    book.forks = forks
    return book


def _read_ticket(row: list[Any]) -> Ticket:
    row = list(row)
    row[_STATE_AT] = _STATES[row[_STATE_AT]]
    row[_REASON_AT] = row[_REASON_AT] and DropReason(OLD_REASONS.get(row[_REASON_AT], row[_REASON_AT]))
    row[_VERSIONS_AT] = tuple(row[_VERSIONS_AT])
    if row[_PARTIAL_AT] is not None:
        attempt, num_tokens, num_bytes, versions, *records = row[_PARTIAL_AT]
        row[_PARTIAL_AT] = PartialRollout(attempt, num_tokens, num_bytes, tuple(versions), *records)
    return Ticket(*row)


def _index(state: Facts) -> None:
    """Build the indexes and counters from the tickets and from those folded away."""
    state.dropped_reasons = state.folded_dropped + Counter(
        ticket.reason.value for ticket in state.dropped if ticket.reason is not None
    )
    state.num_given_up = state.folded_given_up + sum(ticket.is_given_up for ticket in state.dropped)
    for ticket in state.tickets.values():
        state.counts[ticket.state] += 1
        if ticket.state is State.ISSUED:
            state.issued_heap.append(ticket.id)
        elif ticket.state is State.STORED:
            state.stored.add(ticket.id)
        elif ticket.state is State.LEASED:
            state.leases.setdefault(ticket.replica, set()).add(ticket.id)
            if state.settings.policy == "wait":
                state.leased_by_version.setdefault(ticket.version, set()).add(ticket.id)
            state.deadlines.append((ticket.deadline, ticket.id, ticket.attempt))
    heapq.heapify(state.issued_heap)
    heapq.heapify(state.deadlines)
