"""Timeline of leases, stored groups and evaluations, from the buffer's journal (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncrl.buffer.ledger import events as ev
from asyncrl.cli.audit.account import TimedEvent
from asyncrl.cli.timeline.spans import Count, Moment, Span, Timeline, Window, clip, join

BUFFER = "buffer.0"
GROUPS, HELD, EVALUATIONS = "groups", "in hand", "evaluations"


class GroupBook:
    """Reads events in order; `timeline` then tells what falls into the window.

    A lease is open until its group is stored, goes back, is dropped, or the window ends.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._open: dict[int, tuple[str, float, int]] = {}
        self._parts: dict[tuple[int, int], tuple[str, float]] = {}
        self._stored: set[int] = set()
        self._groups: list[Span] = []
        self._evaluations: list[Span] = []
        self._moments: list[Moment] = []
        self._counts: list[Count] = []

    def take_all(self, past: Iterable[TimedEvent]) -> None:
        """Take in all events. Those of older journals without a time are left out."""
        for timed in past:
            if timed.time_s is not None:
                self._take(timed.time_s, timed.event)

    def timeline(self) -> Timeline:
        """Return what fell into the window."""
        end_s = self._window.end_s
        groups = [*self._groups, *self._still_open(end_s)]
        spans = clip([*groups, *join(groups, HELD, "groups in hand"), *self._evaluations], self._window)
        return Timeline(self._window, spans, self._moments, self._counts)

    def _take(self, time_s: float, event: ev.Event) -> None:
        self._take_lease(time_s, event)
        self._take_store(time_s, event)
        self._take_evaluation(time_s, event)
        if self._window.holds(time_s):
            self._note(time_s, event)

    def _take_lease(self, time_s: float, event: ev.Event) -> None:
        match event:
            case ev.Leased(ticket=ticket, replica=replica, version=version):
                self._end(ticket, time_s, "leased again")
                self._open[ticket] = (replica, time_s, version)
            case ev.Stored(ticket=ticket, num_tokens=num_tokens):
                self._end(ticket, time_s, "stored", num_tokens)
            case ev.PartialStored(ticket=ticket, num_tokens=num_tokens):
                self._end(ticket, time_s, "partial", num_tokens)
            case ev.Reissued(ticket=ticket, reason=reason):
                self._end(ticket, time_s, reason)
            case ev.Dropped(ticket=ticket, reason=reason):
                self._end(ticket, time_s, f"dropped: {reason}")

    def _end(self, ticket: int, time_s: float, how: str, num_tokens: int | None = None) -> None:
        if ticket in self._open:
            replica, start_s, version = self._open.pop(ticket)
            about = {"ended": how, "version": version, "tokens": num_tokens}
            self._groups.append(Span(replica, GROUPS, f"ticket {ticket}", start_s, time_s, about))

    def _still_open(self, end_s: float) -> Iterator[Span]:
        for ticket, (replica, start_s, version) in self._open.items():
            about = {"ended": "still open", "version": version}
            yield Span(replica, GROUPS, f"ticket {ticket}", start_s, max(start_s, end_s), about)

    def _take_store(self, time_s: float, event: ev.Event) -> None:
        before = len(self._stored)
        match event:
            case ev.Stored(ticket=ticket):
                self._stored.add(ticket)
            case ev.Dropped(ticket=ticket) | ev.Reissued(ticket=ticket):
                self._stored.discard(ticket)
            case ev.Reserved(tickets=tickets):
                self._stored.difference_update(tickets)
        if len(self._stored) != before and self._window.holds(time_s):
            self._counts.append(Count(BUFFER, "stored groups", time_s, len(self._stored)))

    def _take_evaluation(self, time_s: float, event: ev.Event) -> None:
        match event:
            case ev.EvaluationGiven(id=number, replica=replica, part=part):
                if replica:
                    self._parts[number, part] = (replica, time_s)
                else:
                    self._parts.pop((number, part), None)
            case ev.EvaluationPartDone(id=number, part=part) if (number, part) in self._parts:
                replica, start_s = self._parts.pop((number, part))
                name = f"evaluation {number} part {part}"
                self._evaluations.append(Span(replica, EVALUATIONS, name, start_s, time_s))

    def _note(self, time_s: float, event: ev.Event) -> None:
        match event:
            case ev.VersionRegistered(number=number, step=step):
                self._moments.append(Moment(BUFFER, f"version {number}", time_s, {"step": step}))
            case ev.Trained(step=step, lag_max=lag_max):
                self._moments.append(Moment(BUFFER, f"trained step {step}", time_s, {"lag_max": lag_max}))
            case ev.Checkpointed(step=step, kept=kept):
                about = {"kept": list(kept)}
                self._moments.append(Moment(BUFFER, f"checkpoint of step {step}", time_s, about))
            case ev.Resumed(step=step, is_fork=is_fork):
                self._moments.append(Moment(BUFFER, f"resumed at step {step}", time_s, {"is_fork": is_fork}))
            case ev.Restarted():
                self._moments.append(Moment(BUFFER, "restarted", time_s))
