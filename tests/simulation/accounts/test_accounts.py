"""The accounts themselves: each of them sees what it is there for."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from asyncrl.buffer.ledger.events import Event
from tests.simulation.accounts.evaluations import EvaluationBook
from tests.simulation.accounts.recount import NO_ACCOUNT, Recount
from tests.simulation.accounts.truth import ROOT, WeightsTree
from tests.simulation.accounts.violation import Violation

ISSUED = ["Issued", 1, 0, 0, 0, 0, 0, 0]
LEASED = ["Leased", 1, "rollout.0", 9.0, 0, 1]
STORED = ["Stored", 1, 4, 4, [1, 1]]
NODE = "val-aux/sim/node/mean"


def prompt_at(place: int) -> tuple[int, int, int]:
    return (0, 0, place)


def recount(*events: list[Any]) -> Recount:
    return Recount(prompt_at).read([[event] for event in events])


def test_each_kind_of_event_is_in_the_account_or_named_as_none() -> None:
    kinds = {kind.__name__ for kind in typing.get_args(Event)}
    assert len(kinds) > 15
    assert {kind for kind in kinds - NO_ACCOUNT if not hasattr(Recount, f"_{kind.lower()}")} == set()
    again = recount(ISSUED, LEASED, ["PartialStored", 1, 4, 4, [1, 1]]).tickets[1]
    assert (again.state, again.attempt) == ("issued", 2)


def census(**changed: Any) -> dict[str, Any]:
    pending = {"issued": 0, "leased": 0, "stored": 1, "reserved": 0}
    honest = {
        "issued": 1,
        "trained": 0,
        "dropped": {},
        "pending": pending,
        "prompts_drawn": 1,
        "given_up": 0,
        "open": 1,
        "residue": 0,
    }
    return honest | changed


def test_weights_are_the_same_if_their_content_is_and_lag_is_the_way_between_them():
    tree = WeightsTree()
    a = tree.train(ROOT, "a", (1,), (1,)).id
    b = tree.train(a, "b", (2,), (2,)).id
    other = tree.train(ROOT, "x", (3,), (3,)).id
    assert tree.train(ROOT, "a", (1,), (1,)).id == a
    assert [tree.lag(b, one) for one in (b, a, ROOT)] == [0, 1, 2]
    assert tree.lag(b, other) == tree.lag(other, b) == 3
    assert [node.id for node in tree.path(b)] == [a, b]


def test_a_recount_agrees_with_an_honest_ledger_only():
    recount(ISSUED, LEASED, STORED).check(census())
    for lie in ({"trained": 1}, {"given_up": 1}, {"residue": 1}, {"dropped": {"stale": 1}}):
        with pytest.raises(Violation, match="S1"):
            recount(ISSUED, LEASED, STORED).check(census(**lie))


@pytest.mark.parametrize(
    "events",
    [
        (ISSUED, ISSUED),
        (["Issued", 1, 0, 0, 5, 0, 0, 0],),
        (ISSUED, STORED),
        (ISSUED, LEASED, STORED, STORED),
        (ISSUED, LEASED, ["Reserved", 0, [1]]),
        (["Trained", 1, 0],),
        (["Opened", 2, "a"], ["Opened", 2, "b"]),
        (["Opened", 2, "a"], ["Checkpointed", 1, 1, "d", [1]]),
        (["Opened", 2, "a"], ["Resumed", 1, 0, False, []]),
        (["VersionRegistered", 1, 0], ["VersionRegistered", 1, 1]),
    ],
)
def test_a_recount_refuses_events_that_may_not_be(events):
    with pytest.raises(Violation):
        recount(*events)


def test_a_dropped_prompt_needs_a_child_or_is_given_up():
    stale = ["Dropped", 1, "stale", False]
    counts = census(pending=dict.fromkeys(("issued", "leased", "stored", "reserved"), 0), open=0)
    with pytest.raises(Violation, match="S1"):
        recount(ISSUED, LEASED, STORED, stale).check(counts | {"dropped": {"stale": 1}})
    recount(ISSUED, LEASED, STORED, ["Dropped", 1, "poison", True]).check(
        counts | {"dropped": {"poison": 1}, "given_up": 1}
    )


def halfway() -> EvaluationBook:
    """Evaluation 1 of two parts: the first one is answered at version 5, rollout.1 has the other."""
    book = EvaluationBook()
    book.request(1, 2, 2)
    book.give(1, "rollout.0", 0, 5)
    book.give(1, "rollout.1", 1, 5)
    book.finish_part(1, 0, 5)
    return book


def test_an_evaluation_ends_with_its_last_part_at_the_version_that_it_was_given_at():
    book = halfway()
    assert set(book.open) == {1} and book.fresh == []
    book.finish(1, 5, [(NODE, 3.0)])
    assert not book.open and book.fresh == [1] and book.results == {1: (5, {NODE: 3.0})}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda book: book.request(3, 9),
        lambda book: book.request(2, 2),
        lambda book: book.give(1, "rollout.2", 1, 5),
        lambda book: book.give(1, "rollout.2", 0, 5),
        lambda book: book.give(2, "rollout.2", 0, 5),
        lambda book: book.restart(1),
        lambda book: book.finish_part(1, 1, 6),
        lambda book: book.finish_part(1, 0, 5),
        lambda book: book.finish(1, 6, []),
        lambda book: (book.restart(1), book.finish(1, 5, [])),
    ],
)
def test_what_may_not_become_of_an_evaluation_is_seen(wrong):
    with pytest.raises(Violation, match="eval"):
        wrong(halfway())


def test_a_part_that_is_taken_back_may_be_given_to_another_one_or_all_begin_anew():
    book = halfway()
    book.give(1, "", 1, 5)
    with pytest.raises(Violation, match="not 5"):
        book.give(1, "rollout.2", 1, 6)
    book.restart(1)
    book.give(1, "rollout.2", 0, 6)
    assert book.open[1].served == 6 and not book.open[1].done


def test_an_order_of_a_step_that_the_run_went_back_behind_is_gone():
    book = halfway()
    book.resume(2)
    assert set(book.open) == {1}
    book.resume(1)
    assert not book.open
