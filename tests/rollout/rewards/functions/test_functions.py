"""Rewards: verl's quirks on GSM8K, the demo's reward, and users' own functions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import ConfigError
from rollout_service.rewards.calling import BoundFunction, FunctionReward
from rollout_service.rewards.rules.gsm8k import score_flexible, score_strict
from rollout_service.rewards.rules.matching import score_digit_sort, score_exact_match, score_format
from rollout_service.rewards.score import RewardError, Score
from tests.rollout.rewards.judging import answer, judge, reward_of, score_all, write


@pytest.mark.parametrize(
    ("response", "gold", "wanted"),
    [
        ("so it is #### 18", "18", 1.0),
        ("#### 17 no, #### 18", "18", 1.0),
        ("#### 18 no, #### 17", "18", 0.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 18.", "18", 0.0),
        ("#### $18", "18", 0.0),
        ("####18", "18", 0.0),
        ("18", "18", 0.0),
        ("#### 18" + "x" * 300, "18", 0.0),
        ("#### 18" + "x" * 293, "18", 1.0),
    ],
)
def test_strict_gsm8k_takes_the_last_marked_number_of_the_last_300_characters(
    response: str, gold: str, wanted: float
):
    assert score_strict(response, gold) == wanted


@pytest.mark.parametrize(
    ("response", "gold", "wanted"),
    [
        ("first 3 then 18", "18", 1.0),
        ("it is $18", "18", 1.0),
        ("18 .", "18", 1.0),
        ("it is 18.", "18", 0.0),
        ("1,234", "1234", 0.0),
        ("no number", "18", 0.0),
        ("...", "18", 0.0),
    ],
)
def test_flexible_gsm8k_takes_the_last_run_that_looks_like_a_number(response: str, gold: str, wanted: float):
    assert score_flexible(response, gold) == wanted


def test_exact_match_ignores_white_space_around_only():
    assert score_exact_match(" yes\n", "yes") == 1.0
    assert score_exact_match("y es", "yes") == 0.0


@pytest.mark.parametrize(
    ("response", "finish_reason", "num_tokens", "wanted"),
    [
        ("1234", "stop", 5, 1.0),
        ("1243", "stop", 5, 0.0),
        ("1234", "length", 5, 0.0),
        ("1234", "stop", 6, 0.0),
        ("123", "stop", 4, 0.0),
    ],
)
def test_digit_sort_wants_the_sorted_digits_then_the_end_and_nothing_else(
    response: str, finish_reason: str, num_tokens: int, wanted: float
):
    assert score_digit_sort(response, "1234", finish_reason=finish_reason, num_tokens=num_tokens) == wanted


@pytest.mark.parametrize(
    ("response", "pattern", "wanted"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>\n", "think_answer", 1.0),
        ("<think></think><answer></answer>", "think_answer", 1.0),
        ("<think>a</think><answer>4</answer> and more", "think_answer", 0.0),
        ("<think>a<think>b</think></think><answer>4</answer>", "think_answer", 0.0),
        ("<answer>4</answer><think>a</think>", "think_answer", 0.0),
        ("<think>" * 20_000, "think_answer", 0.0),
        ("so \\boxed{4}", "boxed", 1.0),
        ("so \\boxed{4", "boxed", 0.0),
        ("a\nb: 4", r".*: \d+", 1.0),
        ("a\nb: 4!", r".*: \d+", 0.0),
    ],
)
def test_the_format_is_a_form_by_name_or_an_expression_for_the_whole_response(
    response: str, pattern: str, wanted: float
):
    assert score_format(response, None, pattern) == wanted


def test_a_function_is_called_with_response_and_ground_truth():
    reward = FunctionReward("equal", lambda response, ground_truth: response == ground_truth)
    assert asyncio.run(reward.score(answer("4"))) == Score(1.0, {"equal": 1.0})
    assert asyncio.run(reward.score(answer("5"))).value == 0.0


def test_a_function_may_ask_for_extra_information_by_name():
    def score(response: str, ground_truth: str, extra_info: Any, prompt: Any, factor: float = 1.0) -> float:
        return float(extra_info["level"] + len(prompt)) * factor

    assert BoundFunction("level", score)(answer()).value == 5.0
    assert BoundFunction("level", score, {"factor": 2.0})(answer()).value == 10.0


def test_verls_form_is_recognised_by_its_parameter_names():
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return {"score": float(solution_str == ground_truth and data_source == "sums"), "acc": 1}

    assert BoundFunction("verl", compute_score)(answer()).value == 1.0


def test_of_verls_four_a_function_gets_those_that_it_takes():
    def compute_score(solution_str: str, ground_truth: str, method: str = "strict") -> float:
        return float(solution_str == ground_truth and method == "flexible")

    assert BoundFunction("verl", compute_score, {"method": "flexible"})(answer()).value == 1.0
    everything = BoundFunction("verl", lambda solution_str, **told: float(len(told)))
    assert everything(answer()).value == 3.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda solution_str, ground_truth, method: 1.0, "missing a required .*'method'"),
        (lambda response, ground_truth, level: 1.0, "missing a required .*'level'"),
        (lambda response: 1.0, "too many positional"),
    ],
)
def test_a_function_that_wants_more_than_a_call_brings_is_a_config_error(function: Any, said: str):
    with pytest.raises(ConfigError, match=f"cannot be called: {said}.* A call brings"):
        BoundFunction("mine", function)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), "not_finite"),
        (float("-inf"), "not_finite"),
        (10**400, "not_finite"),
        (1e39, "not_finite"),
        (None, "not_a_number"),
        ("1.0", "not_a_number"),
        ({"acc": 1.0}, "not_a_number"),
        (1j, "not_a_number"),
    ],
)
def test_what_is_no_finite_number_is_a_reward_error(value: Any, kind: str):
    with pytest.raises(RewardError, match=r"not a finite 32-bit number|not a number") as caught:
        BoundFunction("odd", lambda response, ground_truth: value)(answer())
    assert caught.value.kind == kind


def test_a_mapping_without_a_score_is_shown_as_it_was_returned():
    with pytest.raises(RewardError, match=r"returned a dict \(\{'acc': 1\.0\}\), not a number"):
        BoundFunction("odd", lambda response, ground_truth: {"acc": 1.0})(answer())


def test_a_function_that_raises_is_a_reward_error_that_names_the_row():
    def score(response: str, ground_truth: str) -> float:
        raise KeyError("x")

    with pytest.raises(RewardError, match=r"KeyError.*row 7") as caught:
        asyncio.run(FunctionReward("broken", score).score(answer()))
    assert caught.value.kind == "raised"


def test_a_format_score_is_given_for_a_marked_answer_that_is_wrong():
    reward = reward_of({"fn": "gsm8k", "format_score": 0.1})
    assert score_all(reward, "#### 4", "#### 5", "4") == [1.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        ("gsm9k", "there is no reward 'gsm9k'"),
        ("absent.py:score", "does not exist"),
        ("mine.txt:score", "there is no reward"),
        ({"fn": "gsm8k", "formatscore": 1.0}, "no argument 'formatscore'. It takes format_score"),
        ({"fn": "gsm8k", "response": "x"}, "no argument 'response'"),
        ({"fn": "format", "pattern": "("}, "is no regular expression"),
        ({"fn": "math_verify", "workers": 0}, "above 0"),
        ({"fn": "math_verify", "deadline_s": True}, "above 0"),
        ({"fn": "model"}, "needs 'path'"),
        ({"fn": "model", "path": "x", "paht": "y"}, "no argument 'paht'"),
        ("http://me:secret@host/", "key_env"),
        ("http://me:secret@host:70000/", "host and port"),
        ({"fn": "http://[host/", "name": "judge"}, "host and port"),
        (f"http://{'a' * 60}.example:8000/", "1 to 64 chars. Give it a shorter"),
        ({"fn": "http://host/", "key_env": "NOT_SET_ANYWHERE"}, "is not set"),
        (["gsm8k", {"fn": "gsm8k", "weight": 2}], "two rewards are called 'gsm8k'"),
    ],
)
def test_a_reward_that_does_not_exist_or_takes_other_arguments_is_a_config_error(fn: Any, said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        reward_of(fn)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0\n", "ZeroDivisionError"),
        ("def other(response, ground_truth):\n    return 0.0\n", "has no function 'score'"),
        ("def score(response, ground_truth):\n    return 0.0\n", "takes no argument 'factor'"),
    ],
)
def test_a_reward_file_that_cannot_be_used_is_a_config_error_at_the_start(
    tmp_path: Path, body: str, said: str
):
    async def nothing(reward: object) -> None:
        raise AssertionError("it must not start")

    with pytest.raises(ConfigError, match=said):
        judge(reward_of({"fn": write(tmp_path, body), "factor": 2.0}), nothing)
