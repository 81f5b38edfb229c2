"""An account of a run made from its events alone, beside the ledger's own (pure).

Owns a second, plainer opinion on S1, S2, S3 and S5: it keeps one row per ticket, believes nothing that
an event implies, and writes down whatever contradicts an earlier event. It must never use the ledger's
state but to begin from: a fault in `LedgerState.apply` would vouch for itself.

    S1  issued = trained + dropped + pending, prompts drawn = trained + given up + open: every ticket has a
        number, a prompt and one fate, and what is issued again has exactly one parent that was dropped
    S2  no group is trained at two steps of one lineage
    S3  no token over the bound entered a loss
    S5  what changes the run's course carries the newest fencing token
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypedDict

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.state import LedgerState

PENDING = ("issued", "leased", "stored", "reserved")
MAX_FINDINGS = 100
FOLDED_DROP = "dropped/"
SETTLED = {"acked": "trained"}
UNKNOWN = -1
"""The child of a ticket that was dropped before the past begins."""


class Account(TypedDict):
    """Both sides of the laws of conservation: tickets, dropped ones by reason, pending ones by state."""

    issued: int
    trained: int
    dropped: dict[str, int]
    pending: dict[str, int]
    prompts_drawn: int
    given_up: int
    open: int
    residue: int


@dataclass(frozen=True)
class Finding:
    """A discrepancy: the violated law, and the numbers found."""

    law: str
    message: str


@dataclass(slots=True)
class Row:
    """One ticket, according to the events.

    Attributes:
        state: `issued`, `leased`, `stored`, `reserved`, `trained`, `dropped`.
        step: That reserved or trained it, -1 before.
        child: The ticket that repeats its prompt, 0 for none.
        versions: Lowest and highest number that sampled the stored payload.
    """

    prompt: tuple[int, int, int]
    parent: int
    state: str = "issued"
    attempt: int = 1
    step: int = -1
    reason: str = ""
    is_given_up: bool = False
    child: int = 0
    num_tokens: int = 0
    versions: tuple[int, int] = (0, 0)


@dataclass
class Recount:
    """Takes events in order; `findings` is what was wrong so far, `conclude` adds the laws on the whole.

    Args:
        max_lag: The bound that the run was configured with.
    """

    max_lag: int
    rows: dict[int, Row] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    num_events: int = 0
    num_issued: int = 0
    num_drawn: int = 0
    folded: Counter[str] = field(default_factory=Counter)
    steps_trained: int = 0
    num_steps_unsaid: int = 0
    lag_max: int = ev.UNSAID
    token: int = 0
    num_lineages: int = 1
    steps_of_versions: list[int] = field(default_factory=list)
    _batches: dict[int, list[int]] = field(default_factory=dict)
    _prompts: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._books: dict[type[ev.Event], Callable[..., None]] = {
            ev.Opened: self._open,
            ev.VersionRegistered: self._register,
            ev.Issued: self._issue,
            ev.Leased: self._lease,
            ev.Stored: self._store,
            ev.PartialStored: self._store_partial,
            ev.TurnsStored: self._store_turns,
            ev.Reissued: self._reissue,
            ev.Dropped: self._drop,
            ev.Reserved: self._reserve,
            ev.Trained: self._train,
            ev.Checkpointed: self._checkpoint,
            ev.Resumed: self._resume,
        }

    def begin_at(self, state: LedgerState) -> None:
        """Start from a snapshot of the ledger, where the events before it are gone; believe it."""
        self.num_issued, self.num_drawn, self.token = state.num_issued, state.num_drawn, state.token
        self.steps_trained, self.num_lineages = state.steps_trained, state.versions.lineage + 1
        self.steps_of_versions = [*map(state.versions.step_of, range(1, state.versions.last_number + 1))]
        self.folded["trained"], self.folded["given_up"] = state.folded_trained, state.folded_given_up
        for reason, count in state.folded_dropped.items():
            self.folded[FOLDED_DROP + reason] += count
        for number, ticket in state.tickets.items():
            prompt = (ticket.source, ticket.pass_number, ticket.index)
            row = Row(prompt, ticket.parent, SETTLED.get(ticket.state.value, ticket.state.value))
            row.attempt, row.step, row.is_given_up = ticket.attempt, ticket.step, ticket.is_given_up
            row.num_tokens, row.versions = ticket.num_tokens, ticket.versions
            row.child = UNKNOWN if row.state == "dropped" else 0
            row.reason = ticket.reason.value if ticket.reason else ""
            self.rows[number] = row
            self._prompts.setdefault(prompt, number)
        self._batches = {step: [ticket.id for ticket in batch] for step, batch in state.by_step.items()}

    def take(self, event: ev.Event) -> None:
        """Book one event."""
        self.num_events += 1
        book = self._books.get(type(event))
        if book is not None:
            book(event)

    def take_all(self, events: Iterable[ev.Event]) -> None:
        """Book many."""
        for event in events:
            self.take(event)

    def _find(self, law: str, message: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(law, f"event {self.num_events}: {message}"))

    def _row(self, number: int, wanted: tuple[str, ...], what: str) -> Row | None:
        """Return the ticket's row, or None with a finding: it cannot go through this."""
        row = self.rows.get(number)
        if row is None:
            self._find("S1", f"ticket {number} is {what} but was never issued")
        elif row.state not in wanted:
            self._find("S1", f"ticket {number} is {what} while it is {row.state}")
            return None
        return row

    def _open(self, event: ev.Opened) -> None:
        if event.token != self.token + 1:
            self._find("S5", f"fencing token {event.token} follows {self.token}")
        self.token = event.token

    def _register(self, event: ev.VersionRegistered) -> None:
        if event.number != len(self.steps_of_versions) + 1:
            self._find("S4", f"version {event.number} follows {len(self.steps_of_versions)}")
        self.steps_of_versions.append(event.step)

    def _issue(self, event: ev.Issued) -> None:
        prompt = (event.source, event.pass_number, event.row)
        if event.ticket != self.num_issued + 1:
            self._find("S1", f"ticket {event.ticket} is issued after {self.num_issued} others")
        if event.parent:
            self._adopt(event, prompt)
        elif prompt in self._prompts:
            self._find("S1", f"prompt {prompt} is drawn for tickets {self._prompts[prompt]}, {event.ticket}")
        self.num_issued += 1
        self.num_drawn += not event.parent
        self._prompts.setdefault(prompt, event.ticket)
        self.rows[event.ticket] = Row(prompt, event.parent)

    def _adopt(self, event: ev.Issued, prompt: tuple[int, int, int]) -> None:
        parent = self._row(event.parent, ("dropped",), f"repeated by {event.ticket}")
        if parent is None:
            return
        if parent.child or parent.is_given_up or parent.prompt != prompt:
            self._find("S1", f"ticket {event.ticket} cannot repeat {event.parent}: {parent}")
        parent.child = event.ticket

    def _lease(self, event: ev.Leased) -> None:
        row = self._row(event.ticket, ("issued",), "leased")
        if row is not None:
            row.state = "leased"

    def _store(self, event: ev.Stored) -> None:
        row = self._row(event.ticket, ("leased",), "stored")
        if row is not None:
            row.state, row.num_tokens, row.versions = "stored", event.num_tokens, event.versions

    def _store_partial(self, event: ev.PartialStored) -> None:
        row = self._row(event.ticket, ("leased",), "partial")
        if row is not None:
            row.state, row.attempt = "issued", row.attempt + 1

    def _store_turns(self, event: ev.TurnsStored) -> None:
        self._row(event.ticket, ("leased",), "recorded")

    def _reissue(self, event: ev.Reissued) -> None:
        row = self._row(event.ticket, ("leased", "stored", "reserved"), f"issued again ({event.reason})")
        if row is not None:
            self._leave_batch(event.ticket, row)
            row.state, row.attempt = "issued", row.attempt + 1

    def _drop(self, event: ev.Dropped) -> None:
        row = self._row(event.ticket, PENDING, f"dropped ({event.reason})")
        if row is not None:
            self._leave_batch(event.ticket, row)
            row.state, row.reason, row.is_given_up = "dropped", event.reason, event.is_given_up

    def _leave_batch(self, number: int, row: Row) -> None:
        if row.state == "reserved":
            self._batches[row.step].remove(number)
            row.step = -1

    def _reserve(self, event: ev.Reserved) -> None:
        for number in event.tickets:
            row = self._row(number, ("stored",), f"reserved for step {event.step}")
            if row is not None:
                row.state, row.step = "reserved", event.step
                self._batches.setdefault(event.step, []).append(number)

    def _train(self, event: ev.Trained) -> None:
        if event.step != self.steps_trained:
            self._find("S2", f"step {event.step} is trained after {self.steps_trained} steps")
        for number in self._batches.get(event.step, ()):
            row = self.rows[number]
            if row.state == "trained":
                self._find("S2", f"ticket {number} is trained at step {row.step} and at {event.step}")
            row.state = "trained"
            self._check_newest(number, row, event.step)
        self.steps_trained = event.step + 1
        self.lag_max = max(self.lag_max, event.lag_max)
        self.num_steps_unsaid += event.lag_max == ev.UNSAID
        if event.lag_max > self.max_lag:
            self._find("S3", f"step {event.step} trained a token of lag {event.lag_max}, over {self.max_lag}")

    def _check_newest(self, number: int, row: Row, step: int) -> None:
        """Find a group that had no token within the bound: no mask can have saved it.

        By the steps of the versions themselves; where lineages forked, the lag is larger still.
        """
        low, high = row.versions
        newest = max(self.steps_of_versions[low - 1 : high], default=step)
        if step - newest > self.max_lag:
            self._find(
                "S3", f"ticket {number} is trained at step {step}, its newest token is of step {newest}"
            )

    def _checkpoint(self, event: ev.Checkpointed) -> None:
        if event.token != self.token:
            self._find("S5", f"checkpoint {event.step} carries token {event.token}, not {self.token}")
        if event.step > self.steps_trained:
            self._find("S2", f"a checkpoint of step {event.step} after {self.steps_trained} steps")

    def _resume(self, event: ev.Resumed) -> None:
        if event.token != self.token:
            self._find("S5", f"a resume at {event.step} carries token {event.token}, not {self.token}")
        self.num_lineages += 1
        self.steps_trained = event.step
        for step, batch in self._batches.items():
            for number in batch if step >= event.step else ():
                self.rows[number].state = "reserved"

    def conclude(self) -> list[Finding]:
        """Return all findings, those on the whole account among them."""
        found = list(self.findings)
        orphans = [
            number
            for number, row in self.rows.items()
            if row.state == "dropped" and not row.is_given_up and not row.child
        ]
        if orphans:
            found.append(
                Finding("S1", f"tickets {orphans[:10]} were dropped and their prompts were not issued again")
            )
        account = self.account()
        if account["residue"]:
            found.append(Finding("S1", f"the residue is {account['residue']}: {account}"))
        return found

    def account(self) -> Account:
        """Return both laws' sides: `issued`, `trained`, `dropped` by reason, `pending` by state, …"""
        by_state = Counter(row.state for row in self.rows.values())
        dropped = Counter(row.reason for row in self.rows.values() if row.state == "dropped")
        for name, count in self.folded.items():
            if name.startswith(FOLDED_DROP):
                dropped[name.removeprefix(FOLDED_DROP)] += count
        trained = by_state["trained"] + self.folded["trained"]
        num_open = sum(by_state[state] for state in PENDING)
        given_up = self.folded["given_up"] + sum(row.is_given_up for row in self.rows.values())
        residue = abs(self.num_issued - trained - dropped.total() - num_open)
        residue += abs(self.num_drawn - trained - given_up - num_open)
        return {
            "issued": self.num_issued,
            "trained": trained,
            "dropped": dict(dropped),
            "pending": {state: by_state[state] for state in PENDING},
            "prompts_drawn": self.num_drawn,
            "given_up": given_up,
            "open": num_open,
            "residue": residue,
        }
