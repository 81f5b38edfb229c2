"""Evaluations in parts: one version, each part counted once, whoever dies in between."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.evaluations import MAX_OPEN, REFUSED, EvaluationOrders
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import MAX_KEPT_EVALUATIONS, Part
from asyncrl.core.errors import LedgerError
from asyncrl.core.metrics.tallies import Tally
from tests.buffer.ledger.parts.ledger_model import Shadow
from tests.buffer.ledger.parts.ledger_runs import Run

RIGHT = {"acc": Tally(4, 2.0, 2.0, 4)}


def order_of(run: Run) -> EvaluationOrders:
    run.ledger.request_evaluation(run.token, 0)
    return run.ledger.evaluations


def test_parts_go_to_replicas_of_one_version_and_their_sum_is_recorded_once():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    assert orders.give("a", 1, None) == Part(1, 0, 0, 2)
    assert orders.give("b", 1, None) == Part(1, 0, 1, 2)
    assert orders.give("c", 1, None) is None, "two at once are the share"
    assert orders.finish(1, 1, RIGHT, part=1)
    assert run.state.evaluations[1].metrics == {}
    assert orders.finish(1, 1, {"acc": Tally(4, 1.0, 1.0, 4)}, part=0)
    assert not orders.finish(1, 1, RIGHT, part=0)
    found = run.state.evaluations[1]
    assert (found.version, found.metrics["acc"], found.holders, found.results) == (1, 3 / 8, {}, {})


def test_who_finishes_first_takes_the_part_that_is_left():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    orders.give("a", 1, None)
    assert orders.give_more(1, "a", 1) == Part(1, 0, 0, 2), "it has not finished the first"
    orders.finish(1, 1, RIGHT, part=0)
    assert orders.give_more(1, "a", 1) == Part(1, 0, 1, 2)
    assert orders.give_more(1, "a", 1) == Part(1, 0, 1, 2), "the answer to the first call was lost"
    orders.finish(1, 1, RIGHT, part=1)
    assert orders.give_more(1, "a", 1) is None


def test_a_part_that_is_done_outlives_a_snapshot():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    orders.give("a", 1, None)
    orders.give("b", 1, None)
    orders.finish(1, 1, RIGHT, part=0)
    again = Ledger.replay(run.ledger.settings, [], run.state.as_snapshot())
    assert again.state.evaluations[1].holders == {1: "b"}
    assert again.evaluations.finish(1, 1, {"acc": Tally(4, 1.0, 1.0, 4)}, part=1)
    assert again.state.evaluations[1].metrics["acc"] == 3 / 8


def test_the_part_of_a_replica_that_died_is_answered_by_another_at_the_same_version():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    orders.give("a", 1, None)
    orders.give("b", 1, None)
    orders.finish(1, 1, RIGHT, part=0)
    run.ledger.deregister("b")
    assert orders.give("c", 1, None) == Part(1, 0, 1, 2)
    assert orders.finish(1, 1, RIGHT, part=1)
    assert run.state.evaluations[1].metrics["acc"] == 0.5


def test_a_late_result_of_a_part_that_was_given_away_counts_once():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    orders.give("a", 1, None)
    orders.free("a")  # it fell silent
    orders.give("b", 1, None)
    assert orders.finish(1, 1, RIGHT, part=0), "the same seeds at the same version: as good"
    assert not orders.finish(1, 1, RIGHT, part=0)


def test_who_serves_another_version_may_not_help_and_begins_anew_once_nobody_is_left():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    orders.give("a", 1, None)
    orders.finish(1, 1, RIGHT, part=0)
    orders.give_more(1, "a", 1)
    run.train()
    assert run.version == 2
    assert orders.give("b", 2, None) is None
    run.ledger.deregister("a")
    assert orders.give("b", 2, None) == Part(1, 0, 0, 2), "part 0 again: its result was of version 1"
    assert not orders.finish(1, 1, RIGHT, part=1), "of the version that was given up"
    assert orders.finish(1, 2, {"acc": Tally(4, 4.0, 4.0, 4)}, part=0)
    assert orders.give_more(1, "b", 2) == Part(1, 0, 1, 2)
    assert orders.finish(1, 2, {"acc": Tally(4, 4.0, 4.0, 4)}, part=1)
    assert (run.state.evaluations[1].version, run.state.evaluations[1].metrics["acc"]) == (2, 1.0)


def test_a_call_that_waited_too_long_takes_nothing_away_from_its_replica():
    run = Run(evaluation_parts=2)
    run.train()
    orders = order_of(run)
    assert orders.give("a", 2, None) == Part(1, 0, 0, 2)
    assert orders.give("a", 1, None) is None, "asked before the swap, answered after the order was taken"
    assert run.state.evaluations[1].holders == {0: "a"}
    assert orders.give("a", 2, None) == Part(1, 0, 0, 2)
    run.ledger.deregister("a")
    assert orders.give("b", 1, None) is None, "an order never goes back to an older version"
    assert run.state.evaluations[1].served == 2


def test_who_reports_late_does_not_take_the_order_back_to_its_old_version():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    orders.give("a", 1, None)
    orders.free("a")
    run.train()
    orders.give("b", 2, None)
    orders.finish(1, 2, RIGHT, part=0)
    assert not orders.finish(1, 1, RIGHT, part=0)
    assert orders.give_more(1, "a", 1) is None
    assert orders.give("c", 2, None) == Part(1, 0, 1, 2)


def test_a_replica_that_swapped_before_it_began_gets_the_order_at_its_new_version():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    orders.give("a", 1, None)
    run.train()
    assert orders.give("a", 2, None) == Part(1, 0, 0, 2)
    assert run.state.evaluations[1].served == 2


def test_a_part_whose_result_is_refused_ends_and_leaves_no_figure_of_the_others():
    run = Run(evaluation_parts=2)
    orders = order_of(run)
    orders.give("a", 1, None)
    orders.give("b", 1, None)
    orders.refuse(1, "b", 1, 0)
    orders.refuse(1, "a", 2, 0)
    assert run.state.evaluations[1].results == {}, "neither holds that part at that version"
    orders.finish(1, 1, RIGHT, part=0)
    orders.refuse(1, "b", 1, 1)
    assert run.state.evaluations[1].is_done
    assert run.state.evaluations[1].metrics == {REFUSED: 1.0}


def test_a_result_of_a_version_that_was_never_registered_is_refused():
    run = Run()
    orders = order_of(run)
    orders.give("a", 1, None)
    with pytest.raises(LedgerError, match="version 99 was never registered"):
        orders.finish(1, 99, RIGHT)
    assert orders.finish(1, 1, RIGHT)


def test_the_ledger_keeps_the_newest_results_only():
    run = Run()
    for number in range(1, MAX_KEPT_EVALUATIONS + 11):
        orders = order_of(run)
        assert orders.finish(number, 1, RIGHT)
    pending = run.ledger.request_evaluation(run.token, 0)
    kept = sorted(run.state.evaluations)
    assert (len(kept), kept[0], kept[-1]) == (MAX_KEPT_EVALUATIONS + 1, 11, pending)
    assert not orders.finish(1, 1, RIGHT), "nobody waits for it"


class EvaluationMachine(RuleBasedStateMachine):
    """Replicas that take parts, finish, die, swap; the buffer crashes; every order ends, once."""

    @initialize(num_parts=st.integers(1, 3))
    def start(self, num_parts: int) -> None:
        self.run_ = Run(evaluation_parts=num_parts)
        self.shadow = Shadow(self.run_.ledger.settings, LedgerState(self.run_.ledger.settings))
        self.shadow.follow(self.run_.ledger)
        self.held: dict[str, tuple[Part, int]] = {}
        self.counted: dict[int, dict[tuple[int, int], int]] = {}
        self.run_.ledger.request_evaluation(self.run_.token, 0)

    @property
    def orders(self) -> EvaluationOrders:
        return self.run_.ledger.evaluations

    @rule(replica=st.sampled_from("abc"), back=st.integers(0, 1))
    def ask(self, replica: str, back: int) -> None:
        evaluating = self.held[replica][0].id if replica in self.held else None
        version = max(1, self.run_.version - back)
        part = self.orders.give(replica, version, evaluating)
        if part is not None:
            self.held[replica] = (part, version)

    @rule(replica=st.sampled_from("abc"), back=st.integers(0, 2))
    def wait_for_long(self, replica: str, back: int) -> None:
        """A call from before the replica began its part is answered, and nobody reads the answer."""
        if replica not in self.held:
            return
        part, version = self.held[replica]
        evaluation = self.run_.state.evaluations[part.id]
        is_held = evaluation.holders.get(part.part) == replica
        late = self.orders.give(replica, max(1, version - back), None)
        assert (evaluation.holders.get(part.part) == replica) == is_held, "a late call took its part away"
        if is_held:
            assert late in (part, None)
        elif late is not None:
            self.orders.free(replica)

    @rule(replica=st.sampled_from("abc"))
    def finish(self, replica: str) -> None:
        if replica not in self.held:
            return
        part, version = self.held.pop(replica)
        sums = {"acc": Tally(1, float(version), 0.0, 0), f"part{part.part}": Tally(0, 1.0)}
        self.orders.finish(part.id, version, sums, part.part)
        more = self.orders.give_more(part.id, replica, version)
        if more is not None:
            self.held[replica] = (more, version)

    @rule(replica=st.sampled_from("abc"), is_noticed=st.booleans())
    def die(self, replica: str, is_noticed: bool) -> None:
        self.held.pop(replica, None)
        if is_noticed:
            self.run_.ledger.deregister(replica)

    @rule()
    def swap(self) -> None:
        self.run_.version = self.run_.ledger.register_version(self.run_.token, 0)

    @rule(num_snapshots=st.integers(0, 1), is_snapshot=st.booleans())
    def crash(self, num_snapshots: int, is_snapshot: bool) -> None:
        self.shadow.follow(self.run_.ledger)
        if is_snapshot:
            self.shadow.take_snapshot(self.run_.ledger)
        before = self.run_.state.as_values()
        self.run_.ledger = self.shadow.recover(num_snapshots)
        self.run_.state = self.run_.ledger.state
        assert self.run_.state.as_values() == before

    @rule()
    def request(self) -> None:
        self.run_.ledger.request_evaluation(self.run_.token, 0)

    @invariant()
    def results_are_of_one_version_with_each_part_once(self) -> None:
        for evaluation in self.run_.state.evaluations.values():
            assert len(set(evaluation.holders.values())) == len(evaluation.holders) <= evaluation.num_parts
            assert not evaluation.holders.keys() & evaluation.results.keys()
            if evaluation.is_done:
                assert evaluation.metrics["acc"] == evaluation.version, "parts of two versions were added"
                counts = [evaluation.metrics.get(f"part{part}") for part in range(evaluation.num_parts)]
                assert counts == [1.0] * evaluation.num_parts

    def teardown(self) -> None:
        if not hasattr(self, "run_"):
            return
        for replica in "abc":
            self.run_.ledger.deregister(replica)
        self.held.clear()
        for _ in range(9):
            self.ask("a", 0)
            self.finish("a")
        assert all(one.is_done for one in self.run_.state.evaluations.values()), "an order waits for ever"


def test_any_order_of_deaths_swaps_and_crashes_ends_with_one_whole_result_of_one_version():
    run_state_machine_as_test(
        EvaluationMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


def test_no_more_than_so_many_orders_wait_and_the_oldest_that_nobody_has_begun_is_skipped():
    run = Run()
    orders, shadow = order_of(run), Shadow(run.ledger.settings, LedgerState(run.ledger.settings))
    assert orders.give("a", 1, None) == Part(1, 0, 0, 1)
    for step in range(1, MAX_OPEN + 3):
        run.ledger.request_evaluation(run.token, step)
    shadow.follow(run.ledger)
    for state in (run.state, shadow.recover(0).state):
        waiting = [one.id for one in state.evaluations.values() if not one.is_done]
        assert waiting == [1, *range(5, MAX_OPEN + 4)], "the first one is being answered"
    assert orders.finish(1, 1, RIGHT)


def test_a_journal_of_before_parts_is_read():
    ledger = Ledger(Run().ledger.settings)
    for event in (ev.EvaluationRequested(1, 0), ev.unpack(["EvaluationGiven", 1, "a"])):
        ledger.state.apply(event)
    number = ledger.register_version(ledger.open("learner"), 0)
    assert ledger.evaluations.give("a", number, None) == Part(1, 0, 0, 1)
