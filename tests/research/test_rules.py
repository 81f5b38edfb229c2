"""Guarantee and cost of each staleness rule: ours over the real ledger, and models of published ones."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from asyncrl.buffer.ledger.tickets import State
from asyncrl.core.errors import LedgerError
from research.policies.experiment import Cell, Sizes, draw_lengths, run_cell
from research.policies.ledger_rule import LEASE, LedgerRule
from research.policies.queue import Queue
from research.policies.rules import AdmissionOnly, Batch, Blocking, DropAtConsumption
from research.policies.tally import Tally
from research.policies.work import Shape, Work

SMALL = Sizes(groups_per_step=16, warm_up_steps=20, window_steps=60, num_seeds=1)
SHAPE = Shape(groups_per_step=2, slots=3, max_lag=1)
OURS = ("mask", "drop", "wait")


def figures_of(rule: str, sigma: float = 1.2, max_lag: int = 2, batches_in_flight: float = 1.5):
    return run_cell(Cell(rule, sigma, max_lag, batches_in_flight), SMALL)


def run_ledger(policy: str, shape: Shape, rule_type: type[LedgerRule] = LedgerRule):
    rule = rule_type(shape, policy)
    tally = Tally(10, 40)
    figures = Queue(shape, rule, draw_lengths(0, 1.8, 1300.0), tally).run()
    return rule, figures


# Ours


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_no_token_over_the_bound_is_trained_and_the_account_adds_up(policy, max_lag):
    rule, figures = run_ledger(policy, Shape(groups_per_step=8, slots=16, max_lag=max_lag))
    assert figures.violations == 0
    assert rule.residue == 0
    assert not rule.ledger.state.reissues, "no lease expired: every one was renewed"


class Unmasking(LedgerRule):
    """A learner that forgets to mask."""

    def _lowest_version(self, counted, step):
        return 0


@pytest.mark.parametrize("policy", OURS)
def test_the_ledger_refuses_the_step_of_a_learner_that_does_not_mask(policy):
    with pytest.raises(LedgerError, match="the bound is 1"):
        run_ledger(policy, Shape(groups_per_step=8, slots=16, max_lag=1), Unmasking)


class Silent(LedgerRule):
    """Replicas that never renew."""

    def _renew(self, time):
        self.ledger.expire(time)


def test_long_groups_keep_their_leases_only_because_replicas_renew_them():
    shape = Shape(groups_per_step=8, slots=16, max_lag=1)
    with pytest.raises((AssertionError, KeyError)):
        run_ledger("mask", shape, Silent)
    _, figures = run_ledger("mask", shape)
    assert figures.length_bias == 1.0
    assert LEASE < 64 * 1.3, "some groups outlive a lease"


def test_mask_trains_every_group_and_what_it_masks_is_over_age():
    for max_lag in (1, 4):
        figures, areal = figures_of("mask", max_lag=max_lag), figures_of("areal", max_lag=max_lag)
        assert figures.length_bias == 1.0
        assert figures.share < 1
        assert figures.idle <= areal.idle + 0.01
        assert figures.violations == 0 < areal.violations


def test_drop_shortens_the_answers_that_train():
    figures = figures_of("drop")
    assert figures.length_bias < 0.8
    assert figures.share < figures_of("mask").share


def test_wait_masks_less_and_idles_more():
    mask, wait = figures_of("mask", sigma=0.5), figures_of("wait", sigma=0.5)
    assert wait.share > mask.share
    assert wait.idle > mask.idle
    assert wait.length_bias == 1.0


def test_wait_waits_for_what_is_about_to_be_over_age_but_not_longer_than_it_may():
    """One slot holds an endless group; the step that would push it over the bound waits half a step."""
    shape = Shape(groups_per_step=2, slots=3, max_lag=1, max_wait=0.5)
    queue = Queue(shape, LedgerRule(shape, "wait"), chain([5_000], repeat(200)), Tally(1, 2))
    assert queue.run().idle == pytest.approx(0.7 / 1.7, abs=0.01), (
        "0.2 to fill the batch, 0.5 for the endless"
    )
    queue = Queue(shape, LedgerRule(shape, "mask"), chain([5_000], repeat(200)), Tally(1, 2))
    assert queue.run().idle == pytest.approx(0.2 / 1.2, abs=0.01)


def test_the_sampling_replica_and_the_ledger_agree_on_the_versions_of_a_group():
    rule = LedgerRule(SHAPE, "mask")
    numbers = [rule.admit(0.0) for _ in range(2)]
    for number in numbers:
        rule.finish(Work(number, 100, 0.0, 0), 0.1)
    assert rule.take(0.1) == Batch(tuple(numbers), 1)
    rule.publish(0, 1.1)
    late = rule.admit(1.2)
    rule.finish(Work(late, 100, 1.2, 1), 1.3)
    ticket = rule.ledger.state.tickets[late]
    assert (ticket.state, ticket.versions) == (State.STORED, (2, 2))


# Published ones


def test_areal_admits_by_count_and_trains_whatever_is_finished():
    rule = AdmissionOnly(SHAPE)
    assert [rule.admit(0.0) for _ in range(5)] == [1, 2, 3, 4, None], "(max_lag 1 + version 0 + 1) * 2"
    for number in (2, 3, 4):
        rule.finish(Work(number, 1, float(number), 0), 5.0)
    assert rule.take(5.0) == Batch((2, 3)), "the first one is not finished, and nobody waits for it"
    rule.publish(0, 6.0)
    assert rule.admit(6.0) == 5
    assert figures_of("areal").violations > 0.2


def test_blocking_waits_for_a_running_group_that_has_reached_the_bound():
    rule = Blocking(SHAPE)
    slow, first, second = (rule.admit(0.0) for _ in range(3))
    rule.finish(Work(first, 1, 0.0, 0), 0.1)
    rule.finish(Work(second, 1, 0.1, 0), 0.2)
    assert rule.take(0.2) == Batch((first, second))
    rule.publish(0, 1.2)
    for _ in range(2):
        rule.finish(Work(rule.admit(1.2), 1, 1.2, 1), 1.3)
    assert rule.take(1.3) is None, "the slow one began a step ago"
    rule.finish(Work(slow, 1, 0.0, 0), 1.4)
    assert slow in rule.take(1.4).numbers


def test_blocking_keeps_the_bound_wastes_nothing_and_idles():
    figures = figures_of("blocking")
    assert (figures.violations, figures.share, figures.length_bias) == (0, 1, 1)
    assert figures.idle > 0.5


def test_prime_rl_starts_nothing_while_a_batch_beyond_the_one_in_training_is_cut():
    rule = DropAtConsumption(SHAPE)
    for _ in range(4):
        rule.finish(Work(rule.admit(0.0), 1, 0.0, 0), 0.1)
    assert rule.admit(0.1) is None
    rule.publish(0, 1.1)
    assert rule.admit(1.1) == 5


@pytest.mark.parametrize("max_lag", [1, 4])
def test_prime_rl_cuts_one_batch_ahead_in_the_order_in_which_groups_finish(max_lag):
    rule = DropAtConsumption(Shape(groups_per_step=2, slots=3, max_lag=max_lag))
    numbers = [rule.admit(0.0) for _ in range(6)]
    for number in reversed(numbers):
        rule.finish(Work(number, 1, 0.0, 0), 0.1)
    assert [rule.take(0.2) for _ in range(3)] == [Batch((6, 5)), Batch((4, 3)), None]
    rule.publish(0, 1.2)
    in_bound = max_lag > 1  # they began two steps before the weights that they would train
    assert rule.take(1.2) == (Batch((2, 1)) if in_bound else None)
    assert rule.take_dropped() == ([] if in_bound else [2, 1])


def test_prime_rl_cancels_a_running_group_that_the_bound_has_passed():
    rule = DropAtConsumption(SHAPE)
    running = rule.admit(0.0)
    rule.publish(0, 1.0)
    assert rule.take_dropped() == []
    rule.publish(0, 2.0)
    assert rule.take_dropped() == [running]
    assert rule.take_dropped() == []


def test_prime_rl_keeps_the_bound_and_shortens_answers():
    figures, mask = figures_of("prime_rl"), figures_of("mask")
    assert figures.violations == 0
    assert figures.length_bias < 0.8
    assert figures.share < mask.share
