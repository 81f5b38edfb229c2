"""The queueing model: time, spans, the cohort, and the lengths that it is fed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count, islice, repeat
from statistics import mean

import pytest

from asyncrl.core.staleness import Span
from research.policies.experiment import RULES, Cell, Sizes, draw_lengths, run_cell
from research.policies.lengths import LONGEST, length_of, share_longer
from research.policies.queue import Queue
from research.policies.rules import AdmissionOnly, Batch
from research.policies.tally import Tally
from research.policies.work import Shape, Work, spans_of

SMALL = Sizes(groups_per_step=16, warm_up_steps=20, window_steps=40, num_seeds=1)


def test_a_token_bears_the_version_that_was_live_when_it_was_sampled():
    work = Work(number=1, num_tokens=3000, started=0.5, start_step=0)
    spans = spans_of(work, published=[0.0, 1.0, 2.25, 9.0])
    assert spans == (Span(1, 0, 500), Span(2, 500, 1750), Span(3, 1750, 3000))


def test_a_group_that_ends_when_weights_go_live_has_no_token_of_them():
    assert spans_of(Work(1, 1000, 0.0, 0), published=[0.0, 1.0]) == (Span(1, 0, 1000),)
    assert spans_of(Work(1, 500, 1.0, 1), published=[0.0, 1.0]) == (Span(2, 0, 500),)


def test_a_version_that_was_live_for_less_than_a_token_has_no_span():
    spans = spans_of(Work(1, 500, 0.9, 0), published=[0.0, 1.0001, 1.0002])
    assert spans == (Span(1, 0, 100), Span(3, 100, 500))


def test_a_learner_that_is_faster_than_the_slots_waits_for_them():
    shape = Shape(groups_per_step=2, slots=2, max_lag=1)
    figures = Queue(shape, AdmissionOnly(shape), repeat(4000), Tally(5, 15)).run()
    assert figures.idle == pytest.approx(0.75)
    assert figures.pace == pytest.approx(0.25)
    assert (figures.share, figures.length_bias) == (1.0, 1.0)
    assert figures.mean_lag == pytest.approx(0.25), "the first quarter is sampled during the step before"


def test_a_learner_that_is_slower_never_waits():
    shape = Shape(groups_per_step=2, slots=8, max_lag=4)
    figures = Queue(shape, AdmissionOnly(shape), repeat(1000), Tally(5, 15)).run()
    assert figures.idle == 0
    assert figures.pace == pytest.approx(1.0)


def test_every_long_group_of_the_cohort_is_followed_to_its_end():
    shape = Shape(groups_per_step=1, slots=4, max_lag=2)
    lengths = (30_000 if number == 20 else 500 for number in count())
    tally = Tally(10, 20)
    figures = Queue(shape, AdmissionOnly(shape), lengths, tally).run()
    assert tally.is_complete
    assert figures.length_bias == 1.0, "the group of 30 steps ends after the window and is counted"


class Refusing:
    """A rule under which nobody may do anything."""

    def admit(self, time: float) -> None:
        return None

    def finish(self, work: Work, time: float) -> None:
        raise AssertionError("nothing was begun")

    def take(self, time: float) -> Batch | None:
        return None

    def publish(self, lag_max: int, time: float) -> None:
        raise AssertionError("nothing was trained")

    def take_dropped(self) -> list[int]:
        return []

    def wake_time(self) -> None:
        return None


def test_a_rule_under_which_everyone_waits_is_named_as_such():
    queue = Queue(Shape(1, 1, 0), Refusing(), repeat(1), Tally(0, 1))
    with pytest.raises(AssertionError, match="deadlock"):
        queue.run()


@pytest.mark.parametrize("rule", RULES)
def test_the_same_seeds_give_the_same_figures(rule):
    cell = Cell(rule, sigma=1.2, max_lag=2, batches_in_flight=1.5)
    found = run_cell(cell, SMALL)
    assert found == run_cell(cell, SMALL)
    assert found != run_cell(cell, replace(SMALL, num_seeds=2)), "the seed makes no difference"


@pytest.mark.parametrize("sigma", [0.5, 1.2, 1.8])
def test_lengths_have_the_mean_that_was_asked_for_although_they_are_cut(sigma):
    grid = [length_of(_quantile((i + 0.5) / 20_000), sigma, 2.0) for i in range(20_000)]
    assert mean(grid) == pytest.approx(2.0, rel=0.01)
    drawn = list(islice(draw_lengths(0, sigma, 1000.0), 20_000))
    assert max(drawn) <= LONGEST * 1300
    share = sum(length > 1500 for length in drawn) / len(drawn)
    assert share == pytest.approx(share_longer(1.5, sigma, 1.0), abs=0.01)


def _quantile(share: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)


def test_no_rule_that_trains_every_group_is_fresher_than_the_least_lag():
    cell = Cell("mask", sigma=1.2, max_lag=4, batches_in_flight=1.5)
    assert cell.least_lag == pytest.approx(2.01, abs=0.01)
    assert run_cell(cell, SMALL).mean_lag > cell.least_lag - 0.1, "a short run is noisy"


def test_lengths_beyond_the_cut_are_impossible():
    assert share_longer(1e9, 1.8, 1.0) == 0.0
    assert share_longer(0.0, 1.8, 1.0) == 1.0


def test_a_tally_tells_masked_dropped_and_violating_tokens_apart():
    tally = Tally(0, 1)
    works = [Work(number, 100, 0.0, 0) for number in range(3)]
    for work in works:
        tally.begin(work, 0)
    tally.train(works[0], 0, Counter({0: 60, 3: 40}), max_lag=2)
    tally.train(works[1], 0, Counter({1: 70}), max_lag=2)
    assert not tally.is_complete
    tally.drop(works[2], num_generated=30)
    assert tally.is_complete
    figures = tally.figures(duration=1.0, groups_per_step=3, max_lag=2)
    assert figures.violations == pytest.approx(40 / 170)
    assert figures.share == pytest.approx(130 / 230)
    assert figures.length_bias == pytest.approx(1.0)
    assert figures.mean_lag == pytest.approx((3 * 40 + 70) / 170)
    assert figures.pace == pytest.approx(130 / 300)
