"""Detection of two computations of the same log-probs that no longer come from the same weights."""

import math

import pytest

from weight_sync.memory.agreement import FIRST_CHECKS, TOLERANCES, find_disagreement, is_check_due

FLOAT32, BFLOAT16 = TOLERANCES["float32"], TOLERANCES["bfloat16"]
ROUNDING = [1e-6, -2e-6, 0.0, 1e-6]
COARSE = [0.02, -0.01, 0.015, 0.03]


@pytest.mark.parametrize(("tolerance", "first"), [(FLOAT32, ROUNDING), (BFLOAT16, COARSE)])
def test_rounding_is_no_disagreement_at_the_first_comparison_nor_later(tolerance, first):
    assert find_disagreement(tolerance, first, None) == ""
    assert find_disagreement(tolerance, [-value for value in first], first) == ""


def test_in_float32_one_token_that_changed_otherwise_is_enough():
    first, now = ROUNDING * 4, [1e-6, -2e-6, 1.2e-4, 1e-6, *ROUNDING * 3]
    assert "token 2 changed by 0.00012 nats more" in find_disagreement(FLOAT32, now, first)
    assert find_disagreement(FLOAT32, now, [1e-6, -2e-6, 1e-4, 1e-6, *ROUNDING * 3]) == "", (
        "it did so from the start"
    )
    assert find_disagreement(FLOAT32, now, None) == "", "there is nothing to compare with yet"


def test_a_deep_model_that_rounds_more_may_change_by_as_much():
    deep = [8e-5, -2e-5, 8e-5, 1e-5]
    assert find_disagreement(FLOAT32, [8e-5, 1.5e-4, 8e-5, 1e-5], deep) == ""
    assert find_disagreement(FLOAT32, [8e-5, 1.7e-4, 8e-5, 1e-5], deep)


@pytest.mark.parametrize("size", [5e-4, 3e-3])
def test_an_engine_that_was_wrong_from_the_start_does_not_raise_its_own_limit(size):
    wrong = [size, *[0.0] * 15]
    assert find_disagreement(FLOAT32, wrong, None) == "", "its mean is no other model's"
    assert find_disagreement(FLOAT32, [size + 1.9e-4, *wrong[1:]], wrong) == ""
    assert "at most 0.0002 are allowed" in find_disagreement(FLOAT32, [size + 2.1e-4, *wrong[1:]], wrong)


@pytest.mark.parametrize("tolerance", TOLERANCES.values())
def test_a_first_mean_that_was_accepted_is_accepted_again(tolerance):
    first = [0.999 * tolerance.first] * 4
    later = [value + tolerance.margin / 2 for value in first]
    assert find_disagreement(tolerance, first, None) == find_disagreement(tolerance, later, first) == ""
    assert find_disagreement(tolerance, [1.6 * value + tolerance.margin for value in first], first)


def test_a_token_that_the_first_comparison_did_not_have_is_judged_by_itself():
    assert find_disagreement(FLOAT32, [*ROUNDING, 9e-5], [*ROUNDING, None]) == ""
    assert find_disagreement(FLOAT32, [*ROUNDING, 2e-4], [*ROUNDING, None])


def test_in_bfloat16_the_mean_may_be_half_as_much_again_and_five_thousandths():
    mean = sum(map(abs, COARSE)) / len(COARSE)
    allowed = 1.5 * mean + 0.005
    assert find_disagreement(BFLOAT16, [0.99 * allowed] * 4, COARSE) == ""
    assert "nats per token from the learner's" in find_disagreement(BFLOAT16, [1.01 * allowed] * 4, COARSE)


@pytest.mark.parametrize("tolerance", TOLERANCES.values())
def test_another_model_and_what_is_not_a_number_are_found_at_the_first_comparison(tolerance):
    assert find_disagreement(tolerance, [1.01 * tolerance.first] * 4, None)
    assert find_disagreement(tolerance, [math.nan, 0.0], None)
    assert find_disagreement(tolerance, [0.0, math.nan], [0.0, 0.0])


def test_an_engine_checks_its_first_loads_and_then_one_in_every_so_many_steps():
    passed_steps = [0, 3, 4, 9, 10, 11, 31]
    steps = [3, 4, 9, 10, 11, 31, 12]
    pairs = list(zip(steps, passed_steps, strict=True))
    assert [is_check_due(step, 10, FIRST_CHECKS, passed) for step, passed in pairs] == [
        False, False, False, True, False, True, True,
    ], "a step back, as of a rollback, is another"  # fmt: skip
    assert all(is_check_due(step, 10, FIRST_CHECKS - 1, passed) for step, passed in pairs)
    assert all(is_check_due(step, 10, FIRST_CHECKS, None) for step in steps), "the last check has failed"
