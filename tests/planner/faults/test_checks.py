"""The checks themselves: each of them sees what it is there for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.buffer.journals.journal import pack_turn
from asyncrl.buffer.ledger.events import EvaluationDone, EvaluationRequested, VersionRegistered
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.staleness import Span
from asyncrl.planner.faults.checks.evaluations import ASKED, NODE, REFUSED, EvaluationBook, judge, mark_of
from asyncrl.planner.faults.checks.observer import Observer
from asyncrl.planner.faults.checks.recount import Recount
from asyncrl.planner.faults.checks.truth import ROOT, WeightsTree
from asyncrl.planner.faults.checks.violation import Violation
from asyncrl.planner.faults.services.engine import HELD_OUT_IDS
from asyncrl.planner.faults.services.journal import Disk

ISSUED = ["Issued", 1, 0, 0, 0, 0, 0, 0]
LEASED = ["Leased", 1, "rollout.0", 9.0, 0, 1]
STORED = ["Stored", 1, 4, 4, [1, 1]]


def prompt_at(place: int) -> tuple[int, int, int]:
    return (0, 0, place)


def recount(*events: list[Any]) -> Recount:
    return Recount(prompt_at).read([[event] for event in events])


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


def group(ticket: int, version: int, node: int) -> Group:
    one = Trajectory(
        np.full(3, node, np.int32),
        np.ones(3, np.uint8),
        np.zeros(3, np.float32),
        (Span(version, 0, 3),),
        1.0,
        "stop",
    )
    return Group(ticket, 1, np.asarray([1], np.int32), (one,))


def observer(max_lag: int = 1) -> Observer:
    found = Observer(max_lag, prompt_at)
    found.written("publisher.0/1", 1, 1, ROOT)
    return found


def train(watcher: Observer, step: int, parent: int, *groups: Group, branch: int = 0) -> int:
    return watcher.trained(step, parent, groups, lambda version: False, lambda ticket: ticket, branch)


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


def test_no_group_and_no_prompt_is_trained_twice_on_one_way():
    watcher = observer()
    node = train(watcher, 0, ROOT, group(1, 1, ROOT))
    with pytest.raises(Violation, match="S2"):
        train(watcher, 1, node, group(1, 1, ROOT))
    assert train(watcher, 0, ROOT, group(1, 1, ROOT)) == node, "a replay makes the same weights"
    assert train(watcher, 0, ROOT, group(1, 1, ROOT), branch=1) != node


def test_a_token_is_as_old_as_its_weights_are_whatever_its_label_counts_as():
    watcher = observer(max_lag=1)
    first = train(watcher, 0, ROOT, group(1, 1, ROOT))
    second = train(watcher, 1, first, group(2, 1, ROOT))
    with pytest.raises(Violation, match="S3"):
        train(watcher, 2, second, group(3, 1, ROOT))
    assert watcher.lag_max == 2


def test_a_label_stands_for_one_set_of_weights():
    watcher = observer()
    with pytest.raises(Violation, match="S4"):
        train(watcher, 0, ROOT, group(1, 1, 7))
    with pytest.raises(Violation, match="S4"):
        watcher.written("publisher.0/1", 1, 1, 7)
    with pytest.raises(Violation, match="S4"):
        watcher.serves("rollout.0/1", 1, [ROOT, ROOT, 7])
    with pytest.raises(Violation, match="S4"):
        watcher.handed_over("receiver.0/1", 1, [ROOT, ROOT, -1])
    watcher.serves("rollout.0/1", 1, [ROOT, ROOT, ROOT])
    with pytest.raises(Violation, match="S4"):
        watcher.serves("rollout.0/1", 1, [ROOT, ROOT, ROOT])


def test_who_holds_an_older_token_is_not_to_be_heard():
    watcher = observer()
    watcher.opened("publisher.0/1", 3)
    with pytest.raises(Violation, match="S5"):
        watcher.written("publisher.0/1", 2, 2, ROOT)
    watcher.obeys("receiver.0/1", 5)
    with pytest.raises(Violation, match="S5"):
        watcher.obeys("receiver.0/1", 4)


# --- evaluations ----------------------------------------------------------------------------------

GOOD = {NODE: 3.0, f"{NODE}/low": 3.0, f"{NODE}/high": 3.0, ASKED: mark_of(0) + mark_of(1)}


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


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({NODE: 3.5}, "other weights"),
        ({f"{NODE}/high": 3.2}, "other weights"),
        ({ASKED: mark_of(0)}, "not each prompt"),
        ({ASKED: 2 * mark_of(0) + mark_of(1)}, "not each prompt"),
        ({REFUSED: 1.0}, "refused"),
    ],
)
def test_a_result_says_which_weights_answered_which_prompts(changed, told):
    found = judge(GOOD | changed, 3, 2, may_be_refused=False)
    assert told in found and bool(told) == bool(found)


def test_a_result_with_an_unusable_part_has_no_figures():
    assert judge({REFUSED: 1.0}, 3, 2, may_be_refused=True) == ""
    assert judge(GOOD, 3, 2, may_be_refused=True)


def test_an_answer_of_an_evaluation_is_of_the_version_that_it_names():
    watcher = observer()
    watcher.answered("rollout.0/1", 1, 1, [(1, ROOT)])
    for other in ((1, 7), (2, ROOT)):
        with pytest.raises(Violation, match="eval"):
            watcher.answered("rollout.0/1", 1, 1, [(1, ROOT), other])


def test_nobody_is_held_by_the_pin_of_another_process():
    watcher = observer()
    watcher.pins("receiver.0/2", "rollout.0/1")
    watcher.holds("receiver.0/2", "rollout.0/1")
    for receiver, replica in (("receiver.0/2", "rollout.0/3"), ("receiver.0/4", "rollout.0/1")):
        with pytest.raises(Violation, match="eval"):
            watcher.holds(receiver, replica)
    watcher.pins("receiver.0/2", "")
    with pytest.raises(Violation, match="eval"):
        watcher.holds("receiver.0/2", "rollout.0/1")


def test_an_answer_of_an_evaluation_is_not_trained():
    one = group(1, 1, ROOT)
    held_out = Group(one.ticket, one.attempt, HELD_OUT_IDS, one.trajectories)
    with pytest.raises(Violation, match="eval"):
        train(observer(), 0, ROOT, held_out)


@pytest.mark.parametrize(("node", "step", "is_kept"), [(ROOT, 0, True), (ROOT, 1, False), (7, 0, False)])
def test_results_in_the_journal_are_of_weights_that_have_seen_enough_steps(node, step, is_kept):
    watcher = Observer(1, prompt_at, num_held_out=1)
    watcher.written("publisher.0/1", 1, 1, ROOT)
    disk = Disk()
    done = EvaluationDone(1, 1, ((ASKED, mark_of(0)), (NODE, float(node))))
    disk.turns.append(pack_turn([VersionRegistered(1, 0), EvaluationRequested(1, step), done]))
    if is_kept:
        assert not watcher.recount(disk, None).evaluations.open
        assert watcher.tally["evaluations/done"] == 1
        return
    with pytest.raises(Violation, match="eval"):
        watcher.recount(disk, None)
