"""Both laws of accounting, recounted from the journal's turns alone.

It shares no code with the ledger: plain lists of plain values come in, and what each means is written down
here once more. Invariant: a ticket is in one state, a prompt has one end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.accounts.evaluations import EvaluationBook
from tests.simulation.accounts.violation import Violation

OPEN = ("issued", "leased", "stored", "reserved")
NO_ACCOUNT = frozenset(
    {"DataDescribed", "Renewed", "Restarted", "TurnsStored", "PartialDropped", "EvaluationSkipped"}
)
"""Kinds of events that change no account; a kind that is not known ends the reading."""


@dataclass
class _Ticket:
    prompt: tuple[int, int, int]
    parent: int
    state: str = "issued"
    attempt: int = 1
    step: int = -1
    reason: str = ""
    is_given_up: bool = False
    num_children: int = 0


@dataclass
class Recount:
    """The account so far. `prompt_at` is the order in which prompts are to be drawn.

    `stored` lists the attempts whose groups were ever taken in.
    """

    prompt_at: Callable[[int], tuple[int, int, int]]
    tickets: dict[int, _Ticket] = field(default_factory=dict)
    num_drawn: int = 0
    token: int = 0
    num_versions: int = 0
    steps_trained: int = 0
    stored: set[tuple[int, int]] = field(default_factory=set)
    evaluations: EvaluationBook = field(default_factory=EvaluationBook)

    def read(self, turns: Iterable[list[list[Any]]]) -> Recount:
        """Take in the events of all turns."""
        for turn in turns:
            for kind, *values in turn:
                if kind not in NO_ACCOUNT:
                    getattr(self, "_" + kind.lower())(*values)
        return self

    def check(self, census: dict[str, Any]) -> None:
        """Raise Violation unless both laws hold, and the ledger's own census says the same."""
        by_state = Counter(one.state for one in self.tickets.values())
        dropped = Counter(one.reason for one in self.tickets.values() if one.state == "dropped")
        pending = {state: by_state[state] for state in OPEN}
        num_given_up = sum(one.is_given_up for one in self.tickets.values())
        num_open = sum(pending.values())
        own = {
            "issued": len(self.tickets),
            "trained": by_state["trained"],
            "dropped": dict(dropped),
            "pending": pending,
            "prompts_drawn": self.num_drawn,
            "given_up": num_given_up,
            "open": num_open,
        }
        theirs = {name: census[name] for name in own}
        if own != theirs:
            raise Violation("S1", f"the ledger's account {theirs} is not what its events make: {own}")
        residue = len(self.tickets) - by_state["trained"] - sum(dropped.values()) - num_open
        prompts = self.num_drawn - by_state["trained"] - num_given_up - num_open
        if residue or prompts or census["residue"]:
            raise Violation("S1", f"residues {residue} and {prompts} of tickets and prompts: {own}")
        self._check_children()

    def _check_children(self) -> None:
        for number, one in self.tickets.items():
            wants = one.state == "dropped" and not one.is_given_up
            if one.num_children != wants:
                raise Violation("S1", f"ticket {number} ({one.state}) has {one.num_children} children")

    def trained_at(self) -> dict[int, set[int]]:
        """Return the tickets of each trained step."""
        found: dict[int, set[int]] = {}
        for number, one in self.tickets.items():
            if one.state == "trained":
                found.setdefault(one.step, set()).add(number)
        return found

    # --- events -----------------------------------------------------------------------------------

    def _opened(self, token: int, holder: str) -> None:
        if token <= self.token:
            raise Violation("S5", f"the fencing token {token} was given after {self.token}")
        self.token = token

    def _versionregistered(self, number: int, step: int) -> None:
        if number != self.num_versions + 1:
            raise Violation("S4", f"version {number} was registered after {self.num_versions}")
        self.num_versions = number

    def _issued(
        self, number: int, source: int, pass_: int, row: int, position: int, parent: int, age: int
    ) -> None:
        if number in self.tickets:
            raise Violation("S1", f"ticket {number} was issued twice")
        prompt = (source, pass_, row)
        if not parent:
            if prompt != self.prompt_at(self.num_drawn):
                raise Violation("S1", f"prompt {prompt} was drawn at place {self.num_drawn}")
            self.num_drawn += 1
        else:
            self.tickets[parent].num_children += 1
            if prompt != self.tickets[parent].prompt:
                raise Violation("S1", f"ticket {number} repeats another prompt than ticket {parent}")
        self.tickets[number] = _Ticket(prompt, parent)

    def _expect(self, number: int, *states: str) -> _Ticket:
        one = self.tickets[number]
        if one.state not in states:
            raise Violation("S1", f"ticket {number} is {one.state}, and was to be one of {states}")
        return one

    def _leased(self, number: int, replica: str, deadline: float, position: int, version: int = 0) -> None:
        self._expect(number, "issued").state = "leased"

    def _stored(self, number: int, *_: Any) -> None:
        one = self._expect(number, "leased")
        one.state = "stored"
        self.stored.add((number, one.attempt))

    def _reissued(self, number: int, reason: str) -> None:
        one = self._expect(number, "leased", "stored", "reserved")
        one.state, one.step, one.attempt = "issued", -1, one.attempt + 1

    def _partialstored(self, number: int, *_: Any) -> None:
        one = self._expect(number, "leased")
        one.state, one.attempt = "issued", one.attempt + 1

    def _dropped(self, number: int, reason: str, is_given_up: bool) -> None:
        one = self._expect(number, *OPEN)
        one.state, one.step, one.reason, one.is_given_up = "dropped", -1, reason, is_given_up

    def _reserved(self, step: int, numbers: list[int]) -> None:
        for number in numbers:
            one = self._expect(number, "stored")
            one.state, one.step = "reserved", step

    def _trained(self, step: int, lag_max: int = -1) -> None:
        if step != self.steps_trained:
            raise Violation("S2", f"step {step} was booked as trained after {self.steps_trained}")
        self.steps_trained = step + 1
        for one in self.tickets.values():
            if one.state == "reserved" and one.step == step:
                one.state = "trained"

    def _resumed(self, token: int, step: int, *_: Any) -> None:
        if token != self.token:
            raise Violation("S5", f"token {token} resumed, the newest is {self.token}")
        self.steps_trained = min(self.steps_trained, step)
        self.evaluations.resume(step)
        for one in self.tickets.values():
            if one.state == "trained" and one.step >= step:
                one.state = "reserved"

    def _checkpointed(self, token: int, step: int, *_: Any) -> None:
        if token != self.token:
            raise Violation("S5", f"token {token} committed a checkpoint, the newest is {self.token}")

    def _evaluationrequested(self, *values: Any) -> None:
        self.evaluations.request(*values)

    def _evaluationgiven(self, *values: Any) -> None:
        self.evaluations.give(*values)

    def _evaluationrestarted(self, *values: Any) -> None:
        self.evaluations.restart(*values)

    def _evaluationpartdone(self, *values: Any) -> None:
        self.evaluations.finish_part(*values)

    def _evaluationdone(self, *values: Any) -> None:
        self.evaluations.finish(*values)
