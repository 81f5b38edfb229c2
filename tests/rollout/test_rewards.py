"""Rewards: verl's quirks on GSM8K, the demo's reward, and users' own functions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from rollout_service.prompts import Prompt
from rollout_service.rewards.gsm8k import score_flexible, score_strict
from rollout_service.rewards.matching import score_digit_sort, score_exact_match
from rollout_service.rewards.registry import Answer, Reward, RewardError, load_reward

PROMPT = Prompt(7, "2+2=", "4", "sums", {"level": 1})


def answer(response: str = "4") -> Answer:
    return Answer(PROMPT, response, "stop", 2)


def write(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(body)
    return "mine.py:score"


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


def test_a_function_of_a_file_is_called_with_response_and_ground_truth(tmp_path: Path):
    name = write(tmp_path, "def score(response, ground_truth):\n    return response == ground_truth\n")
    reward = load_reward(name, tmp_path)
    assert asyncio.run(reward.score(answer("4"))) == 1.0
    assert asyncio.run(reward.score(answer("5"))) == 0.0


def test_a_function_may_ask_for_extra_information_by_name(tmp_path: Path):
    name = write(tmp_path, "def score(response, ground_truth, extra_info):\n    return extra_info['level']\n")
    assert load_reward(name, tmp_path).score_now(answer()) == 1.0


def test_verls_form_is_recognised_by_its_parameter_names(tmp_path: Path):
    body = "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
    body += "    return {'score': float(solution_str == ground_truth and data_source == 'sums'), 'acc': 1}\n"
    assert load_reward(write(tmp_path, body), tmp_path).score_now(answer()) == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1.0", {"acc": 1.0}])
def test_what_is_no_finite_number_is_a_reward_error(value: Any):
    with pytest.raises(RewardError, match="no finite number"):
        Reward("odd", lambda response, ground_truth: value, runs_in_thread=False).score_now(answer())


def test_a_function_that_raises_is_a_reward_error_that_names_the_row():
    def score(response: str, ground_truth: str) -> float:
        raise KeyError("x")

    with pytest.raises(RewardError, match=r"KeyError.*row 7"):
        asyncio.run(Reward("broken", score, runs_in_thread=True).score(answer()))


@pytest.mark.parametrize("name", ["gsm9k", "absent.py:score", "mine.py:absent", "mine.txt:score"])
def test_a_reward_that_does_not_exist_is_a_config_error(tmp_path: Path, name: str):
    write(tmp_path, "def score(response, ground_truth):\n    return 0.0\n")
    with pytest.raises(ConfigError):
        load_reward(name, tmp_path)


def test_a_reward_file_that_cannot_be_imported_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_reward(write(tmp_path, "1 / 0\n"), tmp_path)
