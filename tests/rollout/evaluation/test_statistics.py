"""mean@k, pass@k and maj@k against figures computed by hand."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.metrics.tallies import conclude, tally_values
from rollout_service.evaluation.answers import choose_extract
from rollout_service.evaluation.statistics import (
    Judged,
    JudgedPrompt,
    estimate_pass_at,
    name_sources,
    score_majority,
    tally_prompts,
)
from rollout_service.rewards.rules.competition_math import extract_boxed
from rollout_service.rewards.rules.dapo_math import extract_dapo


def judged(text: str, *, is_right: bool = False, num_tokens: int = 5, is_cut: bool = False) -> Judged:
    return Judged(is_right, float(is_right), text or None, num_tokens, is_cut)


def prompt(answers: str, gold: str = "a", source: str = "s") -> JudgedPrompt:
    """Answers of one letter each; `.` states nothing, `!` failed."""
    made = (
        None if letter == "!" else judged(letter.strip("."), is_right=letter == gold) for letter in answers
    )
    return JudgedPrompt(source, tuple(made))


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_answer(n: int, data: st.DataObject):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert estimate_pass_at(n, c, k) == pytest.approx(sum(map(any, draws)) / comb(n, k))


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        ("aab", 1.0),  # the majority is right
        ("abb", 0.0),
        ("ab", 0.5),  # a tie counts by the share that is right
        ("abc", pytest.approx(1 / 3)),
        ("a..", 1.0),  # what states nothing has no vote
        ("...", 0.0),
        ("!!a", 1.0),  # and neither has what failed
        ("!!!", 0.0),
    ],
)
def test_the_most_frequent_answer_counts(answers: str, score: float):
    assert score_majority(prompt(answers).done) == score


def test_equal_answers_that_are_judged_differently_count_by_their_share():
    assert score_majority([judged("a", is_right=True), judged("a"), judged("b")]) == 0.5


def test_two_prompts_with_four_answers_each_give_the_figures_by_hand():
    found = conclude(tally_prompts([prompt("aaab"), prompt("abb!", source="t")], 4, {"s": "s", "t": "t"}))
    assert found["val-core/held_out/acc/mean@4"] == found["accuracy"] == (3 / 4 + 1 / 4) / 2
    assert found["val-aux/held_out/acc/pass@2"] == pytest.approx((1 + (1 - 3 / 6)) / 2)
    assert found["val-core/held_out/acc/pass@4"] == 1.0
    assert found["val-core/held_out/acc/maj@4"] == 0.5
    assert (found["val-core/s/acc/mean@4"], found["val-core/t/acc/mean@4"]) == (0.75, 0.25)
    assert (found["val-core/s/acc/maj@4"], found["val-core/t/acc/maj@4"]) == (1.0, 0.0)
    assert (found["val-aux/num_prompts"], found["val-aux/num_failed"]) == (2, 1)
    assert found["val-core/held_out/acc/mean@4/low"] < 0.5 < found["val-core/held_out/acc/mean@4/high"]


def test_one_answer_per_prompt_has_no_pass_and_no_majority():
    found = conclude(tally_prompts([prompt("a"), prompt("b")], 1, {}))
    assert found["val-core/held_out/acc/mean@1"] == 0.5
    assert not [name for name in found if "maj" in name or "pass" in name]


def test_sizes_of_draws_double_up_to_k():
    names = tally_prompts([prompt("aaaaaa")], 6, {})
    drawn = sorted(name.rpartition("@")[2] for name in names if "pass@" in name)
    assert drawn == ["2", "4", "6"]


def test_at_most_32_sources_are_named_and_long_names_are_cut():
    named = name_sources([f"{'x' * 200}{number:02}" for number in range(40)] + [""])
    assert len(named) == 32
    assert max(map(len, named.values())) == 100
    assert len(set(named.values())) == 32, "they agree in their first 100 characters"


def test_a_source_that_is_called_as_all_together_changes_no_total():
    prompts = [prompt("a", source="held_out"), *(prompt("b", source="math") for _ in range(9))]
    found = conclude(tally_prompts(prompts, 1, name_sources(one.source for one in prompts)))
    assert found["accuracy"] == found["val-core/held_out/acc/mean@1"] == pytest.approx(0.1)
    assert found["val-core/held_out~2/acc/mean@1"] == 1.0


def test_lengths_and_rewards_are_one_value_per_prompt_of_the_answers_that_did_not_fail():
    lengths = [10, 20, 30, 40]
    prompts = [JudgedPrompt("s", (judged("a", num_tokens=length), None)) for length in lengths]
    tallies = tally_prompts([*prompts, prompt("!!")], 2, {})
    assert tallies["val-aux/held_out/response_length/mean"] == tally_values([10.0, 20.0, 30.0, 40.0])
    wrong = Judged(False, -1.0, "b", 5, False)
    tallies = tally_prompts([JudgedPrompt("s", (wrong, None))], 2, {})
    assert tallies["reward_mean"].value == -1.0, "a failed answer is no better than a wrong one"
    assert "reward_mean" not in tally_prompts([prompt("!!")], 2, {})


@pytest.mark.parametrize(
    ("functions", "left", "right", "are_equal"),
    [
        (["gsm8k"], "so #### 1,200", "that is #### 1200", True),
        (["gsm8k"], "no number", "none", True),
        (["gsm8k_flexible"], "it is 18", "18 it is", True),
        (["math"], r"\boxed{\frac12}", r"so \boxed{\frac{1}{2}}", True),
        (["math_dapo"], "Answer: 7", "Answer: $7$", True),
        (["format", "gsm8k"], "#### 1", "x #### 1", True),
        (["mine.py:score"], " 12\n", "12", True),
        (["mine.py:score"], "1 2", "12", False),
    ],
)
def test_equal_opinions_are_found_by_the_rule_of_the_reward(functions, left, right, are_equal):
    extract = choose_extract(functions)
    assert (extract(left) == extract(right)) == are_equal


def test_what_states_nothing_is_no_opinion():
    assert choose_extract(["gsm8k"])("I do not know") is None
    assert choose_extract(["x"])("  ") is None
    assert extract_boxed("none") is None
    assert extract_dapo("none") is None
