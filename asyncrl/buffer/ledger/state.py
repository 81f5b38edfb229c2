"""The ledger's state, and how each event changes it (pure).

`apply` is the only thing that changes the state; it never refuses and never looks at a clock, so the
same events always make the same state. Checks belong to the commands in `ledger`; here stand only
asserts on what the commands have promised.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.facts import Facts
from asyncrl.buffer.ledger.snapshot import read_snapshot, write_snapshot
from asyncrl.buffer.ledger.tickets import (
    LOST_LEASE_REASONS,
    TRAINED_STATES,
    Checkpoint,
    DropReason,
    Evaluation,
    LedgerSettings,
    PartialRollout,
    Reissue,
    State,
    Ticket,
    finish_evaluation,
    leave_parts,
    take_issued,
    with_record,
)
from asyncrl.core.metrics.tallies import Tally

MAX_DEADLINES_PER_LEASE = 8
"""Limit on piled-up entries of ended leases: listing them anew touches every lease."""

MAX_DROPPED_TICKETS = 4096
"""Dropped tickets kept one by one; older ones live on in the counters only."""


class LedgerState(Facts):
    """All that the ledger knows, and how each event changes it."""

    def __init__(self, settings: LedgerSettings) -> None:
        super().__init__(settings)
        self._placed_step, self._frontier = -1, 0
        self._placed_gaps: list[tuple[int, int]] = []
        self._appliers: dict[type[ev.Event], Callable[..., None]] = {
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
            ev.PartialStored: self._store_partial,
            ev.TurnsStored: self._store_turns,
            ev.PartialDropped: lambda event: self._let_partial_go(self.tickets[event.ticket]),
            ev.Dropped: self._drop,
            ev.Reserved: self._reserve,
            ev.Trained: self._train,
            ev.Checkpointed: self._checkpoint,
            ev.EvaluationRequested: self._request_evaluation,
            ev.EvaluationGiven: self._give_evaluation,
            ev.EvaluationRestarted: self._restart_evaluation,
            ev.EvaluationSkipped: lambda event: self.evaluations.__delitem__(event.id),
            ev.EvaluationPartDone: self._finish_part,
            ev.EvaluationDone: self._finish_evaluation,
        }

    @property
    def num_open(self) -> int:
        counts = self.counts
        return counts[State.ISSUED] + counts[State.LEASED] + counts[State.STORED] + counts[State.RESERVED]

    def leased(self) -> list[Ticket]:
        """Return all LEASED tickets."""
        return [self.tickets[number] for held in self.leases.values() for number in held]

    @property
    def num_unplaced(self) -> int:
        """Groups that are in work or complete, and not reserved."""
        return self.counts[State.LEASED] + self.counts[State.STORED]

    @property
    def num_missing(self) -> int:
        """Groups that reserved steps lack."""
        return sum(missing for _, missing in self._gaps())

    def batch_size(self, step: int) -> int:
        """Return how many groups step `step` trains: as many as before in a replay."""
        return self.replay_sizes.get(step, self.settings.groups_per_step)

    def next_positions(self, num_older: int = 0) -> tuple[int, int]:
        """Return the positions of the first free place, and of the one after `num_older` next leases."""
        size, gaps, num_before = self.settings.groups_per_step, self._gaps(), self.num_unplaced + num_older
        frontier = size * self._frontier
        first = size * gaps[0][0] if gaps else frontier
        for step, missing in gaps:
            if num_before < missing:
                return first, size * step + num_before
            num_before -= missing
        return first, frontier + num_before

    def _gaps(self) -> list[tuple[int, int]]:
        """Return (step, groups that it lacks) of steps with fewer reserved groups than they train.

        Steps beyond the last reserved one are none of them. There are some where the next step lost a
        payload, and after a resume, whose steps had lost or dropped groups.
        """
        if self._placed_step != self.steps_trained:
            self._place()
        return self._placed_gaps

    def _place(self) -> None:
        """Recount the gaps; whatever changes a reserved batch sets `_placed_step` to -1."""
        self._frontier = max(self.last_reserved + 1, self.steps_trained)
        while self._frontier > self.steps_trained and not self.by_step.get(self._frontier - 1):
            self._frontier -= 1
        found = (
            (step, self.batch_size(step) - len(self.by_step.get(step, ())))
            for step in range(self.steps_trained, self._frontier)
        )
        self._placed_gaps = [(step, missing) for step, missing in found if missing > 0]
        self._placed_step = self.steps_trained

    @property
    def memory_bytes(self) -> int:
        """Bytes that the payloads take, or may take once every lease is pushed."""
        return self.held_bytes + self.counts[State.LEASED] * self.settings.max_group_bytes

    def apply(self, event: ev.Event) -> None:
        """Change the state as `event` says."""
        self._appliers[type(event)](event)

    def as_snapshot(self) -> dict[str, object]:
        """Return the values that events determine as plain ones; call it when `freed` is drained."""
        return write_snapshot(self)

    @classmethod
    def from_snapshot(cls, settings: LedgerSettings, values: Mapping[str, object]) -> LedgerState:
        """Return the state that `as_snapshot` wrote.

        Raises:
            WireError: The values are no snapshot of this version.
        """
        state = cls(settings)
        read_snapshot(state, values)
        return state

    def as_values(self) -> dict[str, object]:
        """Return all that the events determine, for comparison."""
        skipped = {"settings", "freed", "released", "issued_heap", "deadlines"}
        values = {name: value for name, value in vars(self).items() if name not in skipped and name[0] != "_"}
        return values | {"issued_heap": sorted(self.issued_heap)}

    # Learner, data and versions

    def _describe_data(self, event: ev.DataDescribed) -> None:
        self.num_prompts, self.data_digest, self.sources = event.num_prompts, event.digest, event.sources

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
        # A step all of whose groups were dropped trains others this time.
        changed |= {step for step in range(event.step, self.steps_trained) if not self.by_step.get(step)}
        if event.is_fork or changed:
            self.versions.fork(event.step if event.is_fork else min(changed))
        for step, tickets in self.by_step.items():
            if step < event.step:
                continue
            if step < self.steps_trained and tickets:
                self.replay_sizes[step] = len(tickets)
            for ticket in tickets:
                self._move(ticket, State.RESERVED)
        self.steps_trained, self._placed_step, self.paced_open_tickets = event.step, -1, 0
        self._trim_reserved()
        self.acked_steps = min(self.acked_steps, event.step)
        self.checkpoints = {step: kept for step, kept in self.checkpoints.items() if step <= event.step}
        kept = [one for one in self.evaluations.values() if one.is_done or one.step <= event.step]
        self.evaluations = {one.id: one for one in kept}

    def _trim_reserved(self) -> None:
        """Leave to the journal payloads reserved for later steps, beyond one batch in memory."""
        size = self.settings.groups_per_step
        later = [batch for step, batch in sorted(self.by_step.items()) if step > self.steps_trained]
        held = [ticket for batch in later for ticket in batch if ticket.is_held]
        for ticket in held[size:]:
            self._free(ticket)

    # Tickets

    def _move(self, ticket: Ticket, state: State) -> None:
        self.counts[ticket.state] -= 1
        self.counts[state] += 1
        ticket.state = state

    def _issue(self, event: ev.Issued) -> None:
        number, source, pass_number, index, position, parent, generation = event
        assert number == self.num_issued + 1, "tickets are numbered in order of issue"
        ticket = Ticket(number, source, pass_number, index, position, parent, generation)
        self.num_drawn, self.num_issued = self.num_drawn + (not parent), number
        self.tickets[number] = ticket
        self.counts[State.ISSUED] += 1
        heapq.heappush(self.issued_heap, number)

    def _lease(self, event: ev.Leased) -> None:
        number, replica, deadline, position, version = event
        take_issued(self.issued_heap, number)
        ticket = self.tickets[number]
        ticket.replica, ticket.deadline, ticket.position = replica, deadline, position
        ticket.version = self._oldest_version(ticket, version)
        if self.settings.policy == "wait":
            self.leased_by_version.setdefault(ticket.version, set()).add(number)
        self._move(ticket, State.LEASED)
        held = self.leases.get(replica)
        if held is None:
            self.leases[replica] = {number}
        else:
            held.add(number)
        heapq.heappush(self.deadlines, (deadline, number, ticket.attempt))
        if len(self.deadlines) > MAX_DEADLINES_PER_LEASE * self.counts[State.LEASED]:
            self._list_deadlines()

    def _oldest_version(self, ticket: Ticket, served: int) -> int:
        if ticket.partial is None:
            return served
        return min((*ticket.partial.versions, served), key=self.versions.counted_step)

    def _renew(self, event: ev.Renewed) -> None:
        for number in event.tickets:
            self.tickets[number].deadline = event.deadline

    def _restart(self, event: ev.Restarted) -> None:
        for ticket in self.leased():
            ticket.deadline = event.deadline
        self._list_deadlines()

    def _list_deadlines(self) -> None:
        """Leave out the entries of leases that have ended."""
        self.deadlines = [(ticket.deadline, ticket.id, ticket.attempt) for ticket in self.leased()]
        heapq.heapify(self.deadlines)

    def _store(self, event: ev.Stored) -> None:
        ticket = self.tickets[event.ticket]
        self._end_lease(ticket)
        _, ticket.num_tokens, ticket.num_bytes, ticket.versions = event
        self._set_partial(ticket, None)
        ticket.is_held = True
        self.held_bytes += ticket.num_bytes
        self.held_tokens += ticket.num_tokens
        self._move(ticket, State.STORED)
        self.stored.add(ticket.id)

    def _reissue(self, event: ev.Reissued) -> None:
        ticket, reason = self.tickets[event.ticket], Reissue(event.reason)
        self._leave(ticket)
        self.reissues[event.reason] += 1
        ticket.attempt += 1
        ticket.num_failures += reason is Reissue.FAILED
        ticket.num_lost_leases += reason in LOST_LEASE_REASONS
        self._move(ticket, State.ISSUED)
        heapq.heappush(self.issued_heap, ticket.id)

    def _store_partial(self, event: ev.PartialStored) -> None:
        ticket = self.tickets[event.ticket]
        self._end_lease(ticket)
        self._set_partial(ticket, PartialRollout(ticket.attempt, *event[1:]))
        self.reissues[Reissue.PARTIAL.value] += 1
        ticket.attempt += 1
        self._move(ticket, State.ISSUED)
        heapq.heappush(self.issued_heap, ticket.id)

    def _store_turns(self, event: ev.TurnsStored) -> None:
        ticket = self.tickets[event.ticket]
        self._set_partial(ticket, with_record(ticket, *event[1:]))

    def _let_partial_go(self, ticket: Ticket) -> None:
        """Forget a partial rollout and its payload."""
        if ticket.partial is not None:
            self._set_partial(ticket, None)
            self.freed.append(ticket.id)
            self.released.append(ticket.id)

    def _set_partial(self, ticket: Ticket, partial: PartialRollout | None) -> None:
        """Note a partial rollout in place of the one before; a whole group takes its payload's place."""
        before = ticket.partial.num_bytes if ticket.partial is not None else 0
        change = (partial.num_bytes if partial is not None else 0) - before
        self.partial_bytes += change
        self.held_bytes += change
        ticket.partial = partial

    def _drop(self, event: ev.Dropped) -> None:
        ticket = self.tickets[event.ticket]
        if ticket.step >= 0:
            self.refused_steps.add(ticket.step)
        if ticket.state is State.ISSUED:
            take_issued(self.issued_heap, ticket.id)
        else:
            self._leave(ticket)
        self._let_partial_go(ticket)
        ticket.reason, ticket.is_given_up = DropReason(event.reason), event.is_given_up
        self._move(ticket, State.DROPPED)
        self.dropped.append(ticket)
        self.dropped_reasons[event.reason] += 1
        self.num_given_up += event.is_given_up
        if len(self.dropped) > MAX_DROPPED_TICKETS:
            self._fold_dropped(self.dropped.popleft())

    def _leave(self, ticket: Ticket) -> None:
        """Release the holdings of the ticket's state, before it moves to ISSUED or DROPPED."""
        if ticket.state is State.LEASED:
            self._end_lease(ticket)
            return
        if ticket.state is State.STORED:
            self.stored.remove(ticket.id)
        else:
            if ticket.step in self.replay_sizes:  # it breaks here
                self.versions.fork(ticket.step)
            self.by_step[ticket.step].remove(ticket)
            leave_parts(self.parts, ticket)
            self._placed_step, ticket.step = -1, -1
        self._free(ticket)
        self.released.append(ticket.id)

    def _end_lease(self, ticket: Ticket) -> None:
        held = self.leases[ticket.replica]
        held.remove(ticket.id)
        if not held:
            del self.leases[ticket.replica]
        ticket.replica = ""
        if self.settings.policy == "wait":
            leased = self.leased_by_version[ticket.version]
            leased.remove(ticket.id)
            if not leased:
                del self.leased_by_version[ticket.version]

    def _free(self, ticket: Ticket) -> None:
        if ticket.is_held:
            ticket.is_held = False
            self.held_bytes -= ticket.num_bytes
            self.held_tokens -= ticket.num_tokens
            self.freed.append(ticket.id)

    # Batches

    def _reserve(self, event: ev.Reserved) -> None:
        batch = self.by_step.setdefault(event.step, [])
        size = self.batch_size(event.step)
        if batch or len(event.tickets) < size:
            self.parts.setdefault(event.step, []).append(event.tickets)
        self.last_reserved = max(self.last_reserved, event.step)
        self.refused_steps.discard(event.step)  # it is whole again
        self.stored.difference_update(event.tickets)
        self._placed_step = -1
        for number in event.tickets:
            ticket = self.tickets[number]
            ticket.step = event.step
            self._move(ticket, State.RESERVED)
            batch.append(ticket)
        if len(batch) >= size:
            self._pace()

    def _pace(self) -> None:
        """While this step trains, admit about as many groups as it uses up, fewer if too many are left over.

        Generation takes steps to answer. Without this, what replicas can do beyond the learner's pace
        piles up as stored groups and ages: mean lag 0.417 instead of 0.395 of a bound of 8, at equal idle
        (docs/staleness_policies.md).
        """
        surplus = self.counts[State.STORED] - self.settings.left_over_groups
        self.paced_open_tickets = self.num_open + self.settings.groups_per_step - surplus // 4

    def _train(self, event: ev.Trained) -> None:
        for ticket in self.by_step.setdefault(event.step, []):
            self._free(ticket)
            self._move(ticket, State.TRAINED)
        self.replay_sizes.pop(event.step, None)
        self.steps_trained = event.step + 1
        self.paced_open_tickets = 0

    def _checkpoint(self, event: ev.Checkpointed) -> None:
        known = self.checkpoints | {event.step: Checkpoint(event.token, event.step, event.digest)}
        self.checkpoints = {step: known[step] for step in sorted(event.kept) if step in known}
        for step in range(self.acked_steps, event.step):
            for ticket in self.by_step.get(step, ()):
                self._move(ticket, State.ACKED)
        self.acked_steps = max(self.acked_steps, event.step)
        for step in range(self.floor_step, min(self.checkpoints)):
            self.parts.pop(step, None)
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
        self.evaluations[event.id] = Evaluation(event.id, event.step, event.num_parts)

    def _give_evaluation(self, event: ev.EvaluationGiven) -> None:
        self.evaluations[event.id].give(event.part, event.replica, event.version)

    def _restart_evaluation(self, event: ev.EvaluationRestarted) -> None:
        self.evaluations[event.id].restart()

    def _finish_part(self, event: ev.EvaluationPartDone) -> None:
        tallies = {row[0]: Tally(*row[1:]) for row in event.tallies}
        self.evaluations[event.id].finish_part(event.part, event.version, tallies)

    def _finish_evaluation(self, event: ev.EvaluationDone) -> None:
        finish_evaluation(self.evaluations, event.id, event.version, dict(event.metrics))
