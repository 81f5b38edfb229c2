"""The buffer's status costs as much late in a run as early in it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.service import RequestHandler
from asyncrl.buffer.store import ExperienceStore
from tests.buffer.parts import GROUP_SIZE, SETTINGS
from tests.runtimes import ManualClock

NUM_STEPS = 200


def lines_of_a_status(handler: RequestHandler) -> int:
    """Return how many lines of Python a status runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        handler.status()
    finally:
        sys.settrace(before)
    return count


def train(store: ExperienceStore, token: int, num_steps: int) -> None:
    """Lease, store, reserve and train so many steps; no checkpoint lets their tickets go."""
    ledger = store.ledger
    for _ in range(num_steps):
        step = ledger.state.steps_trained
        number = ledger.register_version(token, step)
        while (reserved := ledger.reserve(token, step, 0.0)) is None:
            (grant,) = ledger.lease("a", number, 1, 0.0)
            ledger.store(grant.ticket, 10, 100, (number, number))
        assert reserved
        ledger.trained(token, step, ())


def test_a_status_after_hundreds_of_steps_runs_hardly_more_lines_than_one_after_ten() -> None:
    store = ExperienceStore(SETTINGS, MemoryJournal(), GROUP_SIZE, True, now=0.0)
    store.ledger.describe_data(10_000, "digest")
    token = store.ledger.open("learner")
    handler = RequestHandler(store, ManualClock())
    train(store, token, 10)
    early, num_tickets = lines_of_a_status(handler), len(store.ledger.state.tickets)
    train(store, token, NUM_STEPS)
    late = lines_of_a_status(handler)
    assert len(store.ledger.state.tickets) > 15 * num_tickets, "the tickets are kept"
    assert late <= 1.1 * early
    assert handler.status().trained == take_census(store.ledger.state).trained
