"""The ledger's state, and how each event changes it (pure).

`apply` is the only thing that changes the state; it never refuses and never looks at a clock, so the
same events always make the same state. Checks belong to the commands in `ledger`; here stand only
asserts on what the commands have promised.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.lineage import VersionBook
from asyncrl.buffer.ledger.tickets import (
    LOST_LEASE_REASONS,
    TRAINED_STATES,
    Checkpoint,
    DropReason,
    Evaluation,
    LedgerSettings,
    Reissue,
    State,
    Ticket,
)

MAX_DROPPED_TICKETS = 4096
"""Dropped tickets kept one by one; older ones live on in the counters only."""


class LedgerState:
    """All that the ledger knows.

    Attributes:
        tickets: Every ticket that is not yet folded into the `folded_*` counters.
        issued_heap, stored_heap: Ids of ISSUED and STORED tickets, oldest first.
        deadlines: (deadline, ticket, attempt) of leases; entries of ended leases are skipped later.
        by_step: Tickets reserved or trained, by step.
        replay_sizes: How many groups a step that a resume rewound had.
        floor_step: Steps below it are folded; no resume goes there.
        refused_steps: Trained steps some of whose groups the guard dropped: a replay makes other weights.
        note: What the last resume with a note said.
        freed, released: Tickets whose payload left memory, or is not needed any more at all; the
            store drains both.
    """

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.num_prompts = 0
        self.data_digest = ""
        self.token = 0
        self.holder = ""
        self.is_resumed = False
        self.versions = VersionBook()
        self.tickets: dict[int, Ticket] = {}
        self.num_issued = 0
        self.num_drawn = 0
        self.counts = dict.fromkeys(State, 0)
        self.issued_heap: list[int] = []
        self.stored_heap: list[int] = []
        self.leases: dict[str, dict[int, Ticket]] = {}
        self.deadlines: list[tuple[float, int, int]] = []
        self.by_step: dict[int, list[Ticket]] = {}
        self.replay_sizes: dict[int, int] = {}
        self.steps_trained = 0
        self.acked_steps = 0
        self.floor_step = 0
        self.refused_steps: set[int] = set()
        self.note: dict[str, float] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.held_bytes = 0
        self.held_tokens = 0
        self.dropped: deque[Ticket] = deque()
        self.folded_trained = 0
        self.folded_given_up = 0
        self.folded_dropped: Counter[str] = Counter()
        self.reissues: Counter[str] = Counter()
        self.num_evaluations = 0
        self.evaluations: dict[int, Evaluation] = {}
        self.freed: list[int] = []
        self.released: list[int] = []
        self._appliers: dict[type[Any], Callable[[Any], None]] = {
            ev.DataDescribed: self._describe_data,
            ev.Opened: self._open,
            ev.Resumed: self._resume,
            ev.VersionRegistered: self._register,
            ev.Issued: self._issue,
            ev.Leased: self._lease,
            ev.Renewed: self._renew,
            ev.Restarted: self._restart,
            ev.Stored: self._store,
            ev.Reissued: self._reissue,
            ev.Dropped: self._drop,
            ev.Reserved: self._reserve,
            ev.Trained: self._train,
            ev.Checkpointed: self._checkpoint,
            ev.EvaluationRequested: self._request_evaluation,
            ev.EvaluationGiven: self._give_evaluation,
            ev.EvaluationDone: self._finish_evaluation,
        }

    @property
    def num_open(self) -> int:
        counts = self.counts
        return counts[State.ISSUED] + counts[State.LEASED] + counts[State.STORED] + counts[State.RESERVED]

    @property
    def memory_bytes(self) -> int:
        """Bytes that the payloads take, or may take once every lease is pushed."""
        return self.held_bytes + self.counts[State.LEASED] * self.settings.max_group_bytes

    def apply(self, event: ev.Event) -> None:
        """Change the state as `event` says."""
        self._appliers[type(event)](event)

    def as_values(self) -> dict[str, Any]:
        """Return all that the events determine, for comparison."""
        skipped = {"_appliers", "settings", "freed", "released", "issued_heap", "stored_heap", "deadlines"}
        values = {name: value for name, value in vars(self).items() if name not in skipped}
        return values | {"issued_heap": sorted(self.issued_heap), "stored_heap": sorted(self.stored_heap)}

    # Learner, data and versions

    def _describe_data(self, event: ev.DataDescribed) -> None:
        self.num_prompts, self.data_digest = event.num_prompts, event.digest

    def _open(self, event: ev.Opened) -> None:
        self.token, self.holder = event.token, event.holder
        self.is_resumed = self.steps_trained == 0

    def _register(self, event: ev.VersionRegistered) -> None:
        self.versions.register(event.number, event.step)

    def _resume(self, event: ev.Resumed) -> None:
        self.is_resumed = True
        self.versions.begin_lineage()
        self.note = dict(event.note) or self.note
        changed = {step for step in self.refused_steps if step >= event.step}
        self.refused_steps -= changed
        if event.is_fork or changed:
            self.versions.fork(event.step if event.is_fork else min(changed))
        for step, tickets in self.by_step.items():
            if step < event.step:
                continue
            if step < self.steps_trained and tickets:
                self.replay_sizes[step] = len(tickets)
            for ticket in tickets:
                self._move(ticket, State.RESERVED)
        self.steps_trained = event.step
        self.acked_steps = min(self.acked_steps, event.step)
        self.checkpoints = {step: kept for step, kept in self.checkpoints.items() if step <= event.step}
        pending = [one.id for one in self.evaluations.values() if not one.is_done and one.step > event.step]
        for evaluation in pending:
            del self.evaluations[evaluation]

    # Tickets

    def _move(self, ticket: Ticket, state: State) -> None:
        self.counts[ticket.state] -= 1
        self.counts[state] += 1
        ticket.state = state

    def _issue(self, event: ev.Issued) -> None:
        number, source, pass_number, index, position, parent, generation = event
        assert number == self.num_issued + 1, "tickets are numbered in order of issue"
        ticket = Ticket(number, source, pass_number, index, position, parent, generation)
        self.num_drawn += not parent
        self.num_issued = number
        self.tickets[number] = ticket
        self.counts[State.ISSUED] += 1
        heapq.heappush(self.issued_heap, number)

    def _lease(self, event: ev.Leased) -> None:
        number, replica, deadline, position = event
        assert self.issued_heap[0] == number, "the oldest issued ticket is leased first"
        heapq.heappop(self.issued_heap)
        ticket = self.tickets[number]
        ticket.replica, ticket.deadline, ticket.position = replica, deadline, position
        self._move(ticket, State.LEASED)
        self.leases.setdefault(replica, {})[number] = ticket
        heapq.heappush(self.deadlines, (deadline, number, ticket.attempt))

    def _renew(self, event: ev.Renewed) -> None:
        for number in event.tickets:
            self.tickets[number].deadline = event.deadline

    def _restart(self, event: ev.Restarted) -> None:
        leased = [ticket for held in self.leases.values() for ticket in held.values()]
        for ticket in leased:
            ticket.deadline = event.deadline
        self.deadlines = [(event.deadline, ticket.id, ticket.attempt) for ticket in leased]
        heapq.heapify(self.deadlines)

    def _store(self, event: ev.Stored) -> None:
        ticket = self.tickets[event.ticket]
        self._end_lease(ticket)
        ticket.num_tokens, ticket.num_bytes, ticket.versions = (
            event.num_tokens,
            event.num_bytes,
            event.versions,
        )
        ticket.is_held = True
        self.held_bytes += ticket.num_bytes
        self.held_tokens += ticket.num_tokens
        self._move(ticket, State.STORED)
        heapq.heappush(self.stored_heap, ticket.id)

    def _reissue(self, event: ev.Reissued) -> None:
        ticket, reason = self.tickets[event.ticket], Reissue(event.reason)
        self._leave(ticket)
        self.reissues[event.reason] += 1
        ticket.attempt += 1
        ticket.num_failures += reason is Reissue.FAILED
        ticket.num_lost_leases += reason in LOST_LEASE_REASONS
        self._move(ticket, State.ISSUED)
        heapq.heappush(self.issued_heap, ticket.id)

    def _drop(self, event: ev.Dropped) -> None:
        ticket = self.tickets[event.ticket]
        if event.reason == DropReason.GUARD.value:
            self.refused_steps.add(ticket.step)
        self._leave(ticket)
        ticket.reason, ticket.is_given_up = DropReason(event.reason), event.is_given_up
        self._move(ticket, State.DROPPED)
        self.dropped.append(ticket)
        if len(self.dropped) > MAX_DROPPED_TICKETS:
            self._fold_dropped(self.dropped.popleft())

    def _leave(self, ticket: Ticket) -> None:
        """Undo what the ticket's state holds, before it moves to ISSUED or DROPPED."""
        if ticket.state is State.LEASED:
            self._end_lease(ticket)
            return
        if ticket.state is State.ISSUED:
            self.issued_heap.remove(ticket.id)
            heapq.heapify(self.issued_heap)
            return
        if ticket.state is State.STORED:  # rare: only a lost payload comes here
            self.stored_heap.remove(ticket.id)
            heapq.heapify(self.stored_heap)
        else:
            self._note_broken_replay(ticket)
            self.by_step[ticket.step].remove(ticket)
            ticket.step = -1
        self._free(ticket)
        self.released.append(ticket.id)

    def _note_broken_replay(self, ticket: Ticket) -> None:
        if ticket.step in self.replay_sizes:
            self.versions.fork(ticket.step)

    def _end_lease(self, ticket: Ticket) -> None:
        held = self.leases[ticket.replica]
        del held[ticket.id]
        if not held:
            del self.leases[ticket.replica]
        ticket.replica = ""

    def _free(self, ticket: Ticket) -> None:
        if ticket.is_held:
            ticket.is_held = False
            self.held_bytes -= ticket.num_bytes
            self.held_tokens -= ticket.num_tokens
            self.freed.append(ticket.id)

    # Batches

    def _reserve(self, event: ev.Reserved) -> None:
        batch = self.by_step.setdefault(event.step, [])
        self.refused_steps.discard(event.step)  # it is whole again
        for number in event.tickets:
            assert heapq.heappop(self.stored_heap) == number, "the oldest stored groups are reserved"
            ticket = self.tickets[number]
            ticket.step = event.step
            self._move(ticket, State.RESERVED)
            batch.append(ticket)

    def _train(self, event: ev.Trained) -> None:
        for ticket in self.by_step.setdefault(event.step, []):
            self._free(ticket)
            self._move(ticket, State.TRAINED)
        self.replay_sizes.pop(event.step, None)
        self.steps_trained = event.step + 1

    def _checkpoint(self, event: ev.Checkpointed) -> None:
        known = self.checkpoints | {event.step: Checkpoint(event.token, event.step, event.digest)}
        self.checkpoints = {step: known[step] for step in sorted(event.kept) if step in known}
        for step in range(self.acked_steps, event.step):
            for ticket in self.by_step.get(step, ()):
                self._move(ticket, State.ACKED)
        self.acked_steps = max(self.acked_steps, event.step)
        for step in range(self.floor_step, min(self.checkpoints)):
            for ticket in self.by_step.pop(step, ()):
                self._fold_trained(ticket)
        self.floor_step = max(self.floor_step, min(self.checkpoints))
        self.refused_steps = {step for step in self.refused_steps if step >= self.floor_step}

    def _fold_trained(self, ticket: Ticket) -> None:
        assert ticket.state in TRAINED_STATES
        del self.tickets[ticket.id]
        self.counts[ticket.state] -= 1
        self.folded_trained += 1
        self.released.append(ticket.id)

    def _fold_dropped(self, ticket: Ticket) -> None:
        assert ticket.reason is not None
        del self.tickets[ticket.id]
        self.counts[State.DROPPED] -= 1
        self.folded_dropped[ticket.reason.value] += 1
        self.folded_given_up += ticket.is_given_up

    # Evaluations

    def _request_evaluation(self, event: ev.EvaluationRequested) -> None:
        self.num_evaluations = event.id
        self.evaluations[event.id] = Evaluation(event.id, event.step)

    def _give_evaluation(self, event: ev.EvaluationGiven) -> None:
        self.evaluations[event.id].replica = event.replica

    def _finish_evaluation(self, event: ev.EvaluationDone) -> None:
        evaluation = self.evaluations[event.id]
        evaluation.version, evaluation.metrics = event.version, dict(event.metrics)
