"""Every transition that must not exist: which command is refused in which state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncrl.buffer.ledger.tickets import State
from asyncrl.core.errors import DataError, FencedError, LedgerError
from tests.buffer.ledger.parts.ledger_model import check_refused
from tests.buffer.ledger.parts.ledger_runs import Run

TICKET = 1
STATES = ("unknown", "issued", "leased", "stored", "reserved", "trained", "acked", "dropped", "folded")


def make_run(state: str) -> Run:
    """Return a run whose ticket 1 is in `state`; `folded`: it lives on in the counters only."""
    run = Run()
    run.ledger.drain_events()
    if state == "unknown":
        return run
    run.lease()
    if state == "issued":
        run.ledger.release("a", [(TICKET, 1)])
    elif state == "dropped":
        run.ledger.drop_zero_variance(TICKET)
    elif state != "leased":
        run.ledger.store(TICKET, 10, 100, (1, 1))
        _take_on(run, state)
    found = run.state.tickets.get(TICKET)
    assert (found.state.value if found else state) == state
    run.ledger.drain_events()
    return run


def _take_on(run: Run, state: str) -> None:
    if state == "stored":
        return
    run.fill(1)
    run.ledger.reserve(run.token, 0, 0.0)
    if state == "reserved":
        return
    run.ledger.trained(run.token, 0)
    run.version = run.ledger.register_version(run.token, 1)
    if state == "acked":
        run.ledger.checkpointed(run.token, 0, "d", [0])
        run.ledger.checkpointed(run.token, 1, "d", [0, 1])
    elif state == "folded":
        run.checkpoint()


RAISING: dict[str, tuple[Callable[[Run], object], set[str]]] = {
    "stored": (lambda run: run.ledger.store(TICKET, 10, 100, (1, 1)), {"leased"}),
    "dropped for zero variance": (lambda run: run.ledger.drop_zero_variance(TICKET), {"leased"}),
    "issued again for a lost payload": (lambda run: run.ledger.lose_payload(TICKET), {"stored", "reserved"}),
    "robbed of a partial rollout that it does not have": (lambda run: run.ledger.lose_partial(TICKET), set()),
    "refused by a rollback": (
        lambda run: run.ledger.resume(run.token, run.state.floor_step, refused=[TICKET]),
        {"reserved", "trained", "acked"},
    ),
    "dropped by the learner": (
        lambda run: run.ledger.trained(run.token, run.state.steps_trained, [(TICKET, "stale")]),
        {"reserved"},
    ),
}
"""What a ticket cannot be, but in the states named; the command raises."""


@pytest.mark.parametrize(
    ("state", "act"),
    [
        pytest.param(state, act, id=f"a ticket that is {state} cannot be {name}")
        for name, (act, allowed) in RAISING.items()
        for state in STATES
        if state not in allowed
    ],
)
def test_a_transition_that_does_not_exist_is_refused(state: str, act: Callable[[Run], object]) -> None:
    run = make_run(state)
    check_refused(run.ledger, LedgerError, lambda: act(run))


@pytest.mark.parametrize(
    ("state", "act"),
    [
        pytest.param(state, act, id=f"a ticket that is {state} can be {name}")
        for name, (act, allowed) in RAISING.items()
        for state in sorted(allowed)
    ],
)
def test_a_transition_that_exists_is_made(state: str, act: Callable[[Run], object]) -> None:
    run = make_run(state)
    act(run)
    assert run.ledger.drain_events() and run.residue == 0


QUIET: dict[str, tuple[Callable[[Run], object], object]] = {
    "renewed": (lambda run: run.ledger.renew("a", [(TICKET, 1)], 0.0), [(TICKET, 1)]),
    "released": (lambda run: run.ledger.release("a", [(TICKET, 1)]), 0),
    "failed": (lambda run: run.ledger.fail("a", TICKET, 1), False),
    "partial": (lambda run: run.ledger.store_partial("a", TICKET, 1, 5, 50, (1, 1)), "late"),
    "taken back from a replica that deregisters": (lambda run: run.ledger.deregister("a"), None),
    "expired": (lambda run: run.ledger.expire(1e9), 0),
}
"""What only a leased ticket can be; asked late, the command says so and changes nothing."""


@pytest.mark.parametrize(
    ("state", "act", "answer"),
    [
        pytest.param(state, act, answer, id=f"a ticket that is {state} is not {name}")
        for name, (act, answer) in QUIET.items()
        for state in STATES
        if state != "leased"
    ],
)
def test_what_comes_too_late_changes_nothing(
    state: str, act: Callable[[Run], object], answer: object
) -> None:
    run = make_run(state)
    before = run.state.as_snapshot()
    assert act(run) == answer
    assert run.state.as_snapshot() == before and run.ledger.drain_events() == []


@pytest.mark.parametrize("state", STATES)
def test_only_the_holder_of_the_lease_is_accepted(state: str) -> None:
    run = make_run(state)
    verdicts = {"leased": "accepted", "dropped": "late", "folded": "late"}
    if state in ("unknown", "issued"):
        attempt = 1 if state == "unknown" else 2
        check_refused(run.ledger, LedgerError, lambda: run.ledger.judge_push("a", TICKET, attempt))
    else:
        assert run.ledger.judge_push("a", TICKET, 1) == verdicts.get(state, "duplicate")
        assert run.ledger.judge_push("b", TICKET, 1) != "accepted"


def resumed(run: Run) -> Run:
    run.train()
    run.token = run.ledger.open("successor")
    return run


def reserved(run: Run) -> Run:
    run.fill(2)
    run.ledger.reserve(run.token, 0, 0.0)
    return run


def folded(run: Run) -> Run:
    run.train()
    run.checkpoint()
    return run


LEARNER: dict[str, tuple[Callable[[Run], Run], Callable[[Run], object], type[Exception]]] = {
    "a step before the next one is not reserved": (
        folded,
        lambda run: run.ledger.reserve(run.token, 0, 0.0),
        LedgerError,
    ),
    "a step after the next one is not reserved": (
        lambda run: run,
        lambda run: run.ledger.reserve(run.token, 1, 0.0),
        LedgerError,
    ),
    "a step that is not reserved is not trained": (
        lambda run: run,
        lambda run: run.ledger.trained(run.token, 0),
        LedgerError,
    ),
    "a step after the reserved one is not trained": (
        reserved,
        lambda run: run.ledger.trained(run.token, 1),
        LedgerError,
    ),
    "a step with a token over the bound is not trained": (
        reserved,
        lambda run: run.ledger.trained(run.token, 0, lag_max=2),
        LedgerError,
    ),
    "a ticket is not dropped twice from a batch": (
        reserved,
        lambda run: run.ledger.trained(run.token, 0, [(1, "stale"), (1, "guard")]),
        LedgerError,
    ),
    "a ticket is not dropped for a reason that does not exist": (
        reserved,
        lambda run: run.ledger.trained(run.token, 0, [(1, "bored")]),
        LedgerError,
    ),
    "weights that are not trained yet get no version": (
        reserved,
        lambda run: run.ledger.register_version(run.token, 1),
        LedgerError,
    ),
    "weights that were left behind get no version": (
        folded,
        lambda run: run.ledger.register_version(run.token, 0),
        LedgerError,
    ),
    "a step that is not trained has no checkpoint": (
        reserved,
        lambda run: run.ledger.checkpointed(run.token, 1, "d", [1]),
        LedgerError,
    ),
    "a step before the oldest checkpoint gets none": (
        folded,
        lambda run: run.ledger.checkpointed(run.token, 0, "d", [0]),
        LedgerError,
    ),
    "a checkpoint that is not kept is not committed": (
        folded,
        lambda run: run.ledger.checkpointed(run.token, 1, "d", []),
        LedgerError,
    ),
    "nothing resumes where no checkpoint is": (
        folded,
        lambda run: run.ledger.resume(run.token, 0),
        LedgerError,
    ),
    "a learner that has not resumed reserves nothing": (
        resumed,
        lambda run: run.ledger.reserve(run.token, 1, 0.0),
        LedgerError,
    ),
    "a learner that has not resumed trains nothing": (
        resumed,
        lambda run: run.ledger.trained(run.token, 1),
        LedgerError,
    ),
    "a learner that has not resumed publishes nothing": (
        resumed,
        lambda run: run.ledger.register_version(run.token, 1),
        LedgerError,
    ),
    "a learner that has not resumed commits no checkpoint": (
        resumed,
        lambda run: run.ledger.checkpointed(run.token, 1, "d", [1]),
        LedgerError,
    ),
    "a token of the future is refused": (
        lambda run: run,
        lambda run: run.ledger.register_version(run.token + 1, 0),
        FencedError,
    ),
    "other data than the run began with is refused": (
        lambda run: run,
        lambda run: run.ledger.describe_data(100, "other"),
        DataError,
    ),
    "no lease for a version that was never registered": (
        lambda run: run,
        lambda run: run.ledger.lease("a", 9, 1, 0.0),
        LedgerError,
    ),
    "no bound above the configured one": (
        lambda run: run,
        lambda run: run.ledger.tighten(2),
        LedgerError,
    ),
}


@pytest.mark.parametrize(("begin", "act", "error"), LEARNER.values(), ids=LEARNER)
def test_what_the_learner_may_not_do_is_refused(
    begin: Callable[[Run], Run], act: Callable[[Run], object], error: type[LedgerError]
) -> None:
    run = begin(Run())
    run.ledger.drain_events()
    check_refused(run.ledger, error, lambda: act(run))


def test_the_table_names_every_state() -> None:
    assert {state.value for state in State} <= set(STATES)
