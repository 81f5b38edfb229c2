"""The two laws of accounting, counted from the tickets and added up from the indexes."""

from __future__ import annotations

from asyncrl.buffer.ledger.census import add_up
from tests.buffer.ledger.parts.ledger_runs import Run


def test_a_miscounted_ticket_shows_as_residue() -> None:
    run = Run()
    run.train()
    del run.state.tickets[1]
    assert run.residue == 2


def test_a_ticket_that_an_index_has_lost_shows_as_residue_of_what_is_added_up() -> None:
    run = Run()
    run.train()
    (number, *_) = run.fill(2)
    run.state.stored.remove(number)
    assert add_up(run.state).residue == 2
    run.state.stored.add(number)
    assert add_up(run.state).residue == 0
