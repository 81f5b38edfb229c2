"""Account of a run, and of one ticket, from the journal: numbers and sentences (pure).

Owns the wording of `asyncrl inspect`. Times are seconds since the epoch, None where a journal has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypedDict

from asyncrl.buffer.audit.recount import PENDING, Account, Recount
from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import State, Ticket

AGE_BOUNDS_S = (1, 10, 60, 600, 3600)
"""Upper ends of the classes of the histogram of ages, in seconds; the last class has none."""


@dataclass(frozen=True)
class TimedEvent:
    """An event and when it was journalled."""

    time_s: float | None
    event: ev.Event


@dataclass(frozen=True)
class Moment:
    """One thing that happened to a ticket."""

    time_s: float | None
    what: str


class AccountReport(TypedDict):
    """The account of a run.

    `lag`: trained groups by the lag of their oldest token, which a mask may have kept out of the loss.
    `age_s`: open tickets by the time since they were issued, counted to the newest event.
    """

    account: Account
    steps_trained: int
    lineages: int
    versions: int
    events: int
    lag_max_trained: int | None
    max_lag: int
    lag: dict[int, int]
    age_s: dict[str, int]


def describe_account(
    past: Iterable[TimedEvent], max_lag: int, start: LedgerState | None = None
) -> AccountReport:
    """Return the account, tickets by state, and histograms."""
    recount = Recount(max_lag)
    issued_s: dict[int, float | None] = {}
    newest_s: float | None = None
    if start is not None:
        recount.begin_at(start)
    for timed in past:
        recount.take(timed.event)
        newest_s = timed.time_s if newest_s is None or timed.time_s is None else max(newest_s, timed.time_s)
        if isinstance(timed.event, ev.Issued):
            issued_s[timed.event.ticket] = timed.time_s
    ages = [
        newest_s - issued
        for number, row in recount.rows.items()
        if row.state in PENDING and (issued := issued_s.get(number)) is not None and newest_s is not None
    ]
    return {
        "account": recount.account(),
        "steps_trained": recount.steps_trained,
        "lineages": recount.num_lineages,
        "versions": len(recount.steps_of_versions),
        "events": recount.num_events,
        "lag_max_trained": recount.lag_max if recount.lag_max != ev.UNSAID else None,
        "max_lag": max_lag,
        "lag": dict(sorted(Counter(_lags(recount)).items())),
        "age_s": _classify(ages),
    }


def _lags(recount: Recount) -> Iterable[int]:
    steps = recount.steps_of_versions
    for row in recount.rows.values():
        low, high = row.versions
        if row.state == "trained" and 0 < low <= high <= len(steps):
            yield row.step - min(steps[low - 1 : high])


def _classify(ages_s: Iterable[float]) -> dict[str, int]:
    names = [f"under {bound} s" for bound in AGE_BOUNDS_S] + [f"{AGE_BOUNDS_S[-1]} s and more"]
    classes = dict.fromkeys(names, 0)
    for age_s in ages_s:
        classes[names[sum(age_s >= bound for bound in AGE_BOUNDS_S)]] += 1
    return classes


def trace_ticket(past: Iterable[TimedEvent], number: int, start: LedgerState | None = None) -> list[Moment]:
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
        self.moments: list[Moment] = []
        self._step = -1
        self._is_settled = False
        self._attempt = 1
        self._of_ticket: dict[type[ev.Event], Callable[..., str]] = {
            ev.Leased: self._leased,
            ev.Stored: lambda event: (
                f"stored: {event.num_tokens} tokens, {event.num_bytes} bytes, {_versions(event.versions)}"
            ),
            ev.Carried: lambda event: self._again(
                f"came back unfinished: {event.num_tokens} tokens, {_versions(event.versions)}"
            ),
            ev.CarryDropped: lambda event: f"its unfinished work is given up ({event.reason})",
            ev.Reissued: lambda event: self._again(f"issued again ({event.reason})"),
            ev.Dropped: self._dropped,
        }

    def begin_at(self, state: LedgerState) -> None:
        """Add the ticket's state from a snapshot of the ledger, because its events are gone."""
        ticket = state.tickets.get(self.number)
        if ticket is None:
            if 0 < self.number <= state.num_issued:
                what = "settled before the snapshot that the journal begins with: trained or dropped"
                self.moments.append(Moment(None, what))
            return
        self._step, self._attempt = ticket.step, ticket.attempt
        self._is_settled = ticket.state is State.ACKED
        self.moments.append(Moment(None, f"in the snapshot that the journal begins with: {_stand(ticket)}"))

    def take(self, timed: TimedEvent) -> None:
        """Add the event's information about the ticket, if it has any."""
        what = self._read(timed.event)
        if what:
            self.moments.append(Moment(timed.time_s, what))

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
