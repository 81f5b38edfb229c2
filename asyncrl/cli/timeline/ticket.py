"""History of one ticket from a run's journal, in sentences (pure).

Owns the wording of `asyncrl inspect ticket`. Times are in seconds since the epoch, None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import State, Ticket
from asyncrl.cli.audit.account import TimedEvent


@dataclass(frozen=True)
class TicketMoment:
    """One thing that happened to a ticket."""

    time_s: float | None
    what: str


def trace_ticket(
    past: Iterable[TimedEvent], number: int, start: LedgerState | None = None
) -> list[TicketMoment]:
    """Return the history of one ticket, oldest first; empty if it was never issued.

    Args:
        start: The ledger before the first event, where the journal does not begin with the run.
    """
    tracer = Tracer(number)
    if start is not None:
        tracer.begin_at(start)
    for timed in past:
        tracer.take(timed)
    return tracer.moments


class Tracer:
    """Follows one ticket through the events."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.moments: list[TicketMoment] = []
        self._step = -1
        self._is_settled = False
        self._attempt = 1
        self._of_ticket: dict[type[ev.Event], Callable[..., str]] = {
            ev.Leased: self._leased,
            ev.Stored: lambda event: (
                f"stored: {event.num_tokens} tokens, {event.num_bytes} bytes, {_versions(event.versions)}"
            ),
            ev.PartialStored: lambda event: self._again(
                f"came back unfinished: {event.num_tokens} tokens, {_versions(event.versions)}"
            ),
            ev.TurnsStored: lambda event: f"record {event.number} of its turns: {event.num_bytes} bytes",
            ev.PartialDropped: lambda event: f"its unfinished work is given up ({event.reason})",
            ev.Reissued: lambda event: self._again(f"issued again ({event.reason})"),
            ev.Dropped: self._dropped,
        }

    def begin_at(self, state: LedgerState) -> None:
        """Add the ticket's state from a snapshot of the ledger, because its events are gone."""
        ticket = state.tickets.get(self.number)
        if ticket is None:
            if 0 < self.number <= state.num_issued:
                what = "settled before the snapshot that the journal begins with: trained or dropped"
                self.moments.append(TicketMoment(None, what))
            return
        self._step, self._attempt = ticket.step, ticket.attempt
        self._is_settled = ticket.state is State.ACKED
        self.moments.append(
            TicketMoment(None, f"in the snapshot that the journal begins with: {_stand(ticket)}")
        )

    def take(self, timed: TimedEvent) -> None:
        """Add the event's information about the ticket, if it has any."""
        what = self._read(timed.event)
        if what:
            self.moments.append(TicketMoment(timed.time_s, what))

    def _read(self, event: ev.Event) -> str:
        kind = type(event)
        if isinstance(event, ev.Issued):
            return self._issued(event)
        if kind in self._of_ticket:
            return self._of_ticket[kind](event) if event[0] == self.number else ""
        if isinstance(event, ev.Reserved) and self.number in event.tickets:
            self._step = event.step
            return f"reserved for step {event.step}"
        if self._step < 0:
            return ""
        return self._read_of_batch(event)

    def _read_of_batch(self, event: ev.Event) -> str:
        if isinstance(event, ev.Trained) and event.step == self._step:
            said = "" if event.lag_max == ev.UNSAID else f", the batch's largest lag {event.lag_max}"
            return f"trained at step {event.step}{said}"
        if isinstance(event, ev.Resumed) and event.step <= self._step:
            self._is_settled = False
            return f"reserved for step {self._step} again: the learner resumed at step {event.step}"
        if isinstance(event, ev.Checkpointed) and event.step > self._step and not self._is_settled:
            self._is_settled = True
            return f"in the checkpoint of step {event.step}"
        return ""

    def _issued(self, event: ev.Issued) -> str:
        if event.ticket == self.number:
            parent = f", repeating ticket {event.parent}" if event.parent else ""
            where = f"row {event.row} of source {event.source}, pass {event.pass_number}"
            return f"issued: {where}, position {event.position}{parent}"
        return f"its prompt is repeated by ticket {event.ticket}" if event.parent == self.number else ""

    def _leased(self, event: ev.Leased) -> str:
        version = f", serving version {event.version}" if event.version else ""
        return f"attempt {self._attempt} leased to {event.replica} at position {event.position}{version}"

    def _again(self, what: str) -> str:
        self._attempt += 1
        self._step = -1
        return what

    def _dropped(self, event: ev.Dropped) -> str:
        self._step = -1
        return f"dropped ({event.reason})" + (", its prompt is given up" if event.is_given_up else "")


def _stand(ticket: Ticket) -> str:
    """Return a ticket's state without its history, which is gone."""
    prompt = f"row {ticket.index} of source {ticket.source}, pass {ticket.pass_number}"
    parent = f", repeating ticket {ticket.parent}" if ticket.parent else ""
    step = f" (step {ticket.step})" if ticket.step >= 0 else ""
    reason = f" ({ticket.reason.value})" if ticket.reason else ""
    made = f", {ticket.num_tokens} tokens, {_versions(ticket.versions)}" if ticket.num_tokens else ""
    return f"{ticket.state.value}{step}{reason}, attempt {ticket.attempt}{made}; {prompt}{parent}"


def _versions(versions: tuple[int, int]) -> str:
    low, high = versions
    return f"version {low}" if low == high else f"versions {low} to {high}"
