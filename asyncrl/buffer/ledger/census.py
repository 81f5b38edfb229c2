"""The two laws of accounting, recounted ticket by ticket or added up from the indexes (pure).

    issued        = trained + dropped (by reason) + pending (by state)
    prompts drawn = trained + given up + open

The left sides are counters. `take_census` counts the right sides from the tickets and from the counters of
those that were folded away; its time grows with the run. `add_up` takes them from the indexes of open tickets
and from the counts that each event keeps. `residue` is what does not add up, and is 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import OPEN_STATES, TRAINED_STATES, State


@dataclass(frozen=True)
class Census:
    """Count of all tickets and all prompts, by their state.

    Attributes:
        pending: Open tickets by state. dropped: Dropped tickets by reason.
        open: Prompts on their way. given_up: Prompts that will never be trained.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    pending: dict[str, int]
    prompts_drawn: int
    given_up: int
    open: int

    @property
    def residue(self) -> int:
        settled = self.trained + sum(self.dropped.values()) + sum(self.pending.values())
        prompts = self.trained + self.given_up + self.open
        return abs(self.issued - settled) + abs(self.prompts_drawn - prompts)

    def as_values(self) -> dict[str, object]:
        """Return plain values, `residue` among them."""
        return asdict(self) | {"residue": self.residue}


def take_census(state: LedgerState) -> Census:
    """Count all tickets."""
    by_state = Counter(ticket.state for ticket in state.tickets.values())
    dropped = Counter(state.folded_dropped)
    num_given_up = state.folded_given_up
    for ticket in state.tickets.values():
        if ticket.state is State.DROPPED:
            assert ticket.reason is not None
            dropped[ticket.reason.value] += 1
            num_given_up += ticket.is_given_up
    return Census(
        issued=state.num_issued,
        trained=state.folded_trained + sum(by_state[one] for one in TRAINED_STATES),
        dropped=dict(dropped),
        pending={one.value: by_state[one] for one in OPEN_STATES},
        prompts_drawn=state.num_drawn,
        given_up=num_given_up,
        open=sum(by_state[one] for one in OPEN_STATES),
    )


def add_up(state: LedgerState) -> Census:
    """Return the census without a walk over the tickets, for the status, which is made twice a second."""
    pending = {
        State.ISSUED.value: len(state.issued_heap),
        State.LEASED.value: sum(len(held) for held in state.leases.values()),
        State.STORED.value: len(state.stored),
        State.RESERVED.value: state.counts[State.RESERVED],
    }
    return Census(
        issued=state.num_issued,
        trained=state.folded_trained + sum(state.counts[one] for one in TRAINED_STATES),
        dropped=dict(state.dropped_reasons),
        pending=pending,
        prompts_drawn=state.num_drawn,
        given_up=state.num_given_up,
        open=sum(pending.values()),
    )
