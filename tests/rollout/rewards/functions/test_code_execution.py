"""The reward `code_execution`: forms of tests, what fails, and whose failure it is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.core.errors import ConfigError
from rollout_service.data.prompts import Prompt
from rollout_service.rewards.rules import code_execution
from rollout_service.rewards.score import RewardError
from rollout_service.sandbox import local
from tests.rollout.rewards.judging import answer, judge, reward_of

LONG = pytest.mark.long
SUM = "print(sum(map(int, input().split())))"
ADD = "def add(a, b):\n    return a + b"
PAIRS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}


def value(code: str, ground_truth: object, **arguments: Any) -> float:
    response = f"First:\n```python\nraise\n```\nBetter:\n```python\n{code}\n```\n"
    reward = reward_of({"fn": "code_execution", "test_deadline_s": 60.0, **arguments})
    asked = answer(response, Prompt(7, "?", ground_truth, "code", {}))
    return judge(reward, lambda total: total.score(asked)).value


@pytest.mark.parametrize(
    ("code", "ground_truth"),
    [
        (SUM, PAIRS),
        pytest.param(SUM, json.dumps(PAIRS), marks=LONG),
        pytest.param(SUM, [{"input": "1 2", "output": "3", "testtype": "stdin"}], marks=LONG),
        ("print('1.0000001  2 \\n\\n')", {"inputs": [["a", "b"]], "outputs": [["1 2"]]}),
        (ADD, CALLS),
        pytest.param(ADD, {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}, marks=LONG),
        pytest.param("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS, marks=LONG),
        (ADD, ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]),
        pytest.param(ADD, "assert add(1, 2) == 3\nassert add(2, 2) == 4", marks=LONG),
        pytest.param(ADD, {"assert_case": ["assert add(1, 2) == 3"]}, marks=LONG),
        (ADD, {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}),
    ],
)
def test_a_right_program_passes_the_tests_of_each_form_and_a_wrong_one_does_not(
    code: str, ground_truth: object
) -> None:
    assert value(code, ground_truth) == 1.0
    assert value(code.replace("sum(", "max(").replace("+", "*").replace("'1.", "'2."), ground_truth) == 0.0


@pytest.mark.parametrize(
    "code",
    ["print('true', flush=True); import os; os._exit(0)", "raise SystemExit(0)", "x = (", "input(); input()"],
)
@pytest.mark.parametrize("ground_truth", [PAIRS, CALLS, ["assert add(1, 2) == 3"]])
def test_a_program_that_ends_early_or_does_not_run_passes_nothing(code: str, ground_truth: object) -> None:
    assert value(code, ground_truth) == 0.0


def test_the_share_of_tests_that_pass_may_be_the_value() -> None:
    tests = {"inputs": ["1 2", "2 2", "3 5", "0 4"], "outputs": ["3", "4", "0", "0"]}
    assert value(SUM, tests, continuous=True) == 0.5
    assert value(SUM, tests) == 0.0


def test_a_program_that_takes_too_long_fails_that_test_alone() -> None:
    code = "import time\na, b = input().split()\nif a == '1': time.sleep(600)\nprint(int(a) + int(b))"
    assert value(code, PAIRS, continuous=True, test_deadline_s=1.0) == 0.5


def test_tests_beyond_the_deadline_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_execution, "AT_ONCE", 1)
    late = "import time; time.sleep(1.1)\n" + SUM
    assert value(late, PAIRS, continuous=True, deadline_s=1.0) == 0.5


@pytest.mark.parametrize(
    ("response", "ended", "reason"),
    [
        (SUM, "stop", "no_answer"),
        (SUM, "length", "truncated"),
        ("```python\nprint(0)\n```", "stop", "wrong_answer"),
        ("```python\nprint(0)\n```\nThat", "length", "truncated"),
    ],
)
def test_no_program_is_no_reward_and_each_zero_has_its_reason(response: str, ended: str, reason: str) -> None:
    asked = replace(answer(response, Prompt(7, "?", PAIRS, "code", {})), finish_reason=ended)
    score = judge(reward_of("code_execution"), lambda total: total.score(asked))
    assert (score.value, score.reason, score.parts) == (0.0, reason, {"code_execution": 0.0})


@pytest.mark.parametrize(
    "ground_truth", ["", [], {}, 4, {"inputs": ["1"], "outputs": []}, [1], {"inputs": [], "outputs": []}]
)
def test_a_row_without_tests_is_an_error_and_not_a_zero(ground_truth: object) -> None:
    with pytest.raises(RewardError, match="row 7") as told:
        value(SUM, ground_truth)
    assert told.value.kind == "refused"


def test_a_sandbox_that_fails_is_an_error_and_not_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = reward_of({"fn": "code_execution", "continuous": True})
    monkeypatch.setattr(local, "PYTHON", "/bin/false")
    prompt = Prompt(7, "?", json.dumps(PAIRS), "code", {})
    with pytest.raises(RewardError, match="row 7") as told:
        judge(reward, lambda total: total.score(answer(f"```python\n{SUM}\n```", prompt)))
    assert told.value.kind == "died"


def test_arguments_that_it_does_not_take_are_refused() -> None:
    for arguments in (
        {"seconds": 1},
        {"deadline_s": 0},
        {"sandbox": {"memory": 1}},
        {"sandbox": {"workers": "x"}},
    ):
        with pytest.raises(ConfigError):
            reward_of({"fn": "code_execution", **arguments})
