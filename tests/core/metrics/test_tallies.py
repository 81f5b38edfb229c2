"""Sums of parts, and the intervals that they give, against figures computed by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.metrics.tallies import Tally, add_up, conclude, tally_shares, tally_values, wilson


def test_wilson_is_the_textbook_s():
    # 8 of 10: (0.8 + 1.9208/10 -+ 1.96 sqrt(0.8 0.2/10 + 0.9604/100)) / (1 + 3.8416/10)
    assert wilson(0.8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.16113), abs=1e-5)
    assert wilson(1.0, 20) == pytest.approx((0.83887, 1.0), abs=1e-5)


def test_one_answer_per_prompt_is_a_plain_proportion():
    tally = tally_shares([1.0] * 8 + [0.0] * 2, 1)
    assert tally == Tally(10, 8.0, 8.0, 10)
    assert tally.interval() == pytest.approx(wilson(0.8, 10))


def test_answers_to_one_prompt_that_agree_count_as_one_trial():
    agreeing = tally_shares([1.0] * 8 + [0.0] * 2, 4)
    assert agreeing.interval() == pytest.approx(wilson(0.8, 10)), "4 equal answers say no more than one"
    # Shares 3/4 and 1/4: variance 1/16, so 0.25 * 10 / (1/16) = 40 trials: as if all were independent.
    mixed = tally_shares([0.75] * 5 + [0.25] * 5, 4)
    assert mixed.interval() == pytest.approx(wilson(0.5, 40))
    assert tally_shares([1.0] * 10, 4).interval() == pytest.approx(wilson(1.0, 10)), "no spread to go by"


def test_prompts_that_are_alike_spread_as_little_as_almost_alike_ones():
    low, high = tally_shares([0.5] * 100, 4).interval()
    almost_low, almost_high = tally_shares([0.5] * 99 + [0.75], 4).interval()
    assert (high - low) == pytest.approx(almost_high - almost_low, rel=0.01)


@pytest.mark.parametrize("num_first", [0, 3, 5])
def test_the_order_of_adding_changes_no_interval(num_first: int):
    first, second = tally_shares([1 / 3] * num_first, 3), tally_shares([1 / 3] * (10 - num_first), 3)
    assert first.plus(second).interval() == pytest.approx(wilson(1 / 3, 30))


def test_sums_that_are_no_shares_end_no_buffer():
    assert Tally(2, 200.0, 30000.0, 5).interval() == pytest.approx(wilson(1.0, 2))
    assert tally_values([1e150, 1e150]).interval() is not None


def test_a_mean_that_is_no_share_has_the_normal_interval():
    # Mean 2, squared deviations 1 + 0 + 1, standard error sqrt(2/3 / 2).
    low, high = tally_values([1.0, 2.0, 3.0]).interval()
    assert (low + high) / 2 == pytest.approx(2.0)
    assert (high - low) / 2 == pytest.approx(1.959964 * math.sqrt(1 / 3))


def test_a_single_prompt_and_a_mere_sum_have_no_interval():
    found = conclude({"one": tally_shares([1.0], 4), "failed": Tally(0, 3.0)})
    assert found == {"one": 1.0, "failed": 3.0}


@given(
    shares=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=40),
    cut=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_parts_add_up_to_the_whole_and_the_mean_lies_within_its_bounds(shares, cut):
    parts = [{"acc": tally_shares(part, 4)} for part in (shares[:cut], shares[cut:]) if part]
    whole = conclude(add_up(parts))
    assert whole == pytest.approx(conclude({"acc": tally_shares(shares, 4)}))
    assert -1e-9 <= whole["acc/low"] <= whole["acc"] + 1e-9
    assert whole["acc"] - 1e-9 <= whole["acc/high"] <= 1 + 1e-9
