"""Reasons of failed and zero rewards: nothing that failed becomes a zero, and hidden faults are told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from asyncrl.core.experience import MAX_REASON_CHARS
from asyncrl.core.obstacle import ADVISORY, Cause
from rollout_service.data.prompts import Prompt
from rollout_service.environments import Environment, EnvironmentFailed, Step
from rollout_service.environments.adapters.verifiers_library import VerifiersLibrary
from rollout_service.environments.registry import Episodes
from rollout_service.environments.tools.python_expression import PythonExpression
from rollout_service.rewards.rules import equivalence
from rollout_service.rewards.score import Answer, RewardError, RewardsFailed, Score
from rollout_service.rewards.total import FIRST_ANSWERS, WINDOW_ANSWERS, ErrorRate, TotalReward
from rollout_service.rewards.zeros import MAX_SOURCES, MAX_USUAL, NEWEST, ZeroWatch
from rollout_service.tasks.tiny_text import build_tokenizer
from tests.rollout.environments.parts import make_prompt, run_episode
from tests.rollout.replica.replica_parts import open_stage
from tests.rollout.rewards.judging import PROMPT, answer, judge, reward_of, write
from tests.rollout.rewards.test_remote import serving
from tests.rollout.rewards.test_total import ask, total_of
from tests.waiting import wait_for

FAILING = """
import os, sys, time
class ConnectTimeout(TimeoutError, ConnectionError): pass
class ConnectError(Exception): "as httpx has it"
class Answered(Exception): pass

def score(response, ground_truth):
    if response in ("ConnectionError", "TimeoutError", "KeyError", "SystemExit", "MemoryError"):
        raise getattr(__import__("builtins"), response)("x")
    if response in globals():
        raise globals()[response]("x")
    if response == "hangs":
        time.sleep(3600)
    if response == "exits":
        os._exit(0)
    if response.startswith("says "):
        return {"score": 0.0, "reason": response.removeprefix("says ")}
    return {"none": None, "text": "0.0", "nan": float("nan"), "map": {}, "list": [0.0]}.get(response, 0.0)
"""
FAILED_BY = {
    "ConnectionError": "infrastructure",
    "ConnectError": "infrastructure",
    "TimeoutError": "timeout",
    "ConnectTimeout": "timeout",
    "KeyError": "reward",
    "MemoryError": "reward",
    "Answered": "reward",
    "SystemExit": "reward",
    "hangs": "timeout",
    "exits": "reward",
    "none": "reward",
    "text": "reward",
    "nan": "reward",
    "map": "reward",
    "list": "reward",
    "says infrastructure": "infrastructure",
    "says timeout": "timeout",
    "says environment": "environment",
    "says budget": "budget",
}


async def outcome_of(calling: Awaitable[Score]) -> Any:
    """Return the reason of a failure, or the score."""
    try:
        return await calling
    except RewardError as error:
        return str(error.reason)


def test_no_way_in_which_a_function_fails_makes_a_zero_and_each_has_its_reason(tmp_path: Path):
    reward = reward_of({"fn": write(tmp_path, FAILING), "deadline_s": 5.0}, max_error_rate=1.0)

    async def work(reward: TotalReward) -> list[Any]:
        return [await outcome_of(reward.score(answer(response))) for response in FAILED_BY]

    assert judge(reward, work) == list(FAILED_BY.values())
    assert sum(reward.status().sources["sums"].values()) == len(FAILED_BY)
    assert "rewarded" not in reward.status().sources["sums"]


def test_a_zero_has_the_reason_that_its_function_says_and_no_other_number_has_one(tmp_path: Path):
    reward = reward_of({"fn": write(tmp_path, FAILING)})
    words = ("says no_answer", "says the tests\nof the answer failed" + 99 * "!", "0")

    async def work(reward: TotalReward) -> list[Any]:
        return [(await outcome_of(reward.score(answer(one)))).reason for one in words]

    assert judge(reward, work) == ["no_answer", ("the testsof the answer failed" + 99 * "!")[:64], ""]
    assert reward.status().sources == {"sums": {"no_answer": 1, "other": 1, "unsaid": 1}}
    assert MAX_REASON_CHARS == 64
    kept = total_of(lambda response, ground_truth: {"score": 1.0, "reason": "no_answer"})
    assert asyncio.run(kept.score(answer())).reason == ""


@pytest.mark.parametrize(
    ("fn", "response", "finish_reason", "reason"),
    [
        ("gsm8k", "#### 5", "stop", "wrong_answer"),
        ("gsm8k", "five", "stop", "no_answer"),
        ("gsm8k", "five", "length", "truncated"),
        ("gsm8k", "#### 4", "length", ""),
        ("math", r"\boxed{5}", "stop", "wrong_answer"),
        ("math_dapo", "Answer: 5", "stop", "wrong_answer"),
        ("exact_match", "5", "turns", "truncated"),
        ({"fn": "format", "pattern": "boxed"}, "5", "stop", "wrong_answer"),
        ([{"fn": "format", "pattern": "boxed", "weight": 0}, "gsm8k"], "five", "stop", "no_answer"),
    ],
)
def test_a_registered_rule_says_why_it_gives_zero(fn: Any, response: str, finish_reason: str, reason: str):
    found = judge(reward_of(fn), lambda reward: reward.score(Answer(PROMPT, response, finish_reason, 2)))
    assert found.reason == reason


SERVED = {
    "not there": ('{"scores": [0]}', 404, "infrastructure"),
    "a proxy's page": ("<html>Bad gateway</html>", 200, "infrastructure"),
    "cut": ('{"scores": [0', 200, "infrastructure"),
    "down": ("", 503, "infrastructure"),
    "no list": ('{"scores": 0}', 200, "reward"),
    "an error": ('{"scores": [{"error": "out of order"}]}', 200, "reward"),
    "a reason": ('{"scores": [{"score": 0, "reason": "timeout"}]}', 200, "timeout"),
    "null": ('{"scores": [null]}', 200, "reward"),
}


@pytest.mark.parametrize("case", SERVED)
def test_no_way_in_which_a_server_fails_makes_a_zero(case: str):
    body, status, reason = SERVED[case]

    async def say(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body, content_type="application/json")

    async def work() -> Any:
        async with serving(say) as url:
            reward = reward_of({"fn": url, "deadline_s": 0.3}, max_error_rate=1.0)
            try:
                return await outcome_of(reward.score(answer()))
            finally:
                await reward.close()

    assert asyncio.run(work()) == reason


class Playing(Environment):
    """Fails as the class says, in `step` or `score`."""

    step_raises: Exception | None = None
    scored: Any = 0.0

    def __init__(self, *_: Any) -> None: ...

    async def step(self, answer: str) -> Step:
        if self.step_raises is not None:
            raise self.step_raises
        return Step(is_done=True)

    async def score(self) -> Any:
        if isinstance(self.scored, Exception):
            raise self.scored
        return self.scored


@pytest.mark.parametrize(
    ("raised", "scored", "reason"),
    [
        (ConnectionResetError("sandbox"), 0.0, "infrastructure"),
        (TimeoutError("sandbox"), 0.0, "timeout"),
        (KeyError("x"), 0.0, "environment"),
        (EnvironmentFailed("gone", kind="died"), 0.0, "infrastructure"),
        (None, ConnectionRefusedError("judge"), "infrastructure"),
        (None, Score(0.0, reason="infrastructure"), "infrastructure"),
        (None, Score(0.0, reason="timeout"), "timeout"),
        (None, float("nan"), "environment"),
        (None, "0.0", "environment"),
    ],
)
def test_no_way_in_which_an_environment_fails_makes_a_zero(raised: Any, scored: Any, reason: str):
    made = type("Made", (Playing,), {"step_raises": raised, "scored": scored})
    with pytest.raises(EnvironmentFailed) as failed:
        run_episode(Episodes(made), [("1", [1])])
    assert failed.value.reason == reason


def test_the_zero_of_an_environment_keeps_its_reason():
    made = type("Made", (Playing,), {"scored": Score(0.0, reason="no_answer")})
    assert run_episode(Episodes(made), [("1", [1])])[0].reason == "no_answer"


class SwallowingRubric:
    """As the rubric of `verifiers` 0.1: what a function raises is a 0 in its reward."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self.funcs = list(functions)

    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["reward"], state["metrics"] = 0.0, {}
        for function in self.funcs:
            try:
                found = function(state["completion"])
                state["metrics"][function.__name__] = await found if hasattr(found, "__await__") else found
            except Exception:
                state["metrics"][function.__name__] = 0.0


class Rubrics(SwallowingRubric):
    def __init__(self, *rubrics: SwallowingRubric) -> None:
        self.rubrics = rubrics

    async def score_rollout(self, state: dict[str, Any]) -> None:
        for rubric in self.rubrics:
            await rubric.score_rollout(state)


def length(completion: Any) -> float:
    return float(len(completion))


def unreachable(completion: Any) -> float:
    raise ConnectionError("no judge")


async def broken(completion: Any) -> float:
    raise KeyError("x")


class InfraError(Exception):
    """By the name that `verifiers` gives to its own."""


@pytest.mark.parametrize(
    ("rubric", "error", "reason"),
    [
        (SwallowingRubric(length, unreachable), None, "infrastructure"),
        (Rubrics(SwallowingRubric(length), SwallowingRubric(broken)), None, "environment"),
        (SwallowingRubric(length), InfraError("no sandbox"), "infrastructure"),
        (SwallowingRubric(length), ValueError("the model called no tool"), ""),
    ],
)
def test_what_a_rubric_of_verifiers_swallows_fails_the_episode(rubric: Any, error: Any, reason: str):
    async def env_response(messages: Any, state: Any) -> Any:
        return []

    async def is_completed(state: Any) -> bool:
        state["error"] = error
        return True

    env: Any = SimpleNamespace(rubric=rubric, env_response=env_response, is_completed=is_completed)
    episodes = Episodes(VerifiersLibrary("mine", {}, lambda *_, **__: env))
    tokenizer = build_tokenizer()
    prompt = make_prompt(({"role": "user", "content": "2+3?"},), "5", tokenizer)
    run = partial(run_episode, episodes, [("4", [1])], prompt, 400, tokenizer)
    if not reason:
        assert run()[0].reward_parts == {"environment": 0.0, "length": 1.0}
        return
    with pytest.raises(EnvironmentFailed) as failed:
        run()
    assert failed.value.reason == reason


def test_an_answer_that_a_busy_machine_could_not_compare_is_no_wrong_one(
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("math_verify")
    clock = iter([(0.0, 0.0), (9.0, 1.0), (0.0, 0.0), (9.0, 8.0), (0.0, 0.0), (1.0, 0.1)])
    times = (SimpleNamespace(elapsed=wall, user=busy, system=0.0) for wall, busy in clock)
    monkeypatch.setattr(equivalence, "os", SimpleNamespace(times=lambda: next(times)))
    with pytest.raises(TimeoutError, match=r"1\.0 s of work took 9\.0 s: the machine is too busy"):
        equivalence.score_math_verify(r"\boxed{5}", "4")
    assert equivalence.score_math_verify(r"\boxed{5}", "4") == 0.0, "the answer took the time"
    assert equivalence.score_math_verify(r"\boxed{5}", "4") == 0.0, "no limit was reached"


def test_an_expression_whose_process_does_not_run_is_not_the_models_fault():
    async def work() -> str:
        tool = PythonExpression(timeout_s=60.0)
        assert await tool.call("1+1") == "2"
        os.kill(tool._idle[0].pid, signal.SIGSTOP)
        tool._timeout_s = 0.2
        with pytest.raises(EnvironmentFailed, match=r"computed for 0\.00 s in 0\.2 s") as failed:
            await tool.call("2+2")
        assert not tool._idle
        return str(failed.value.reason)

    assert asyncio.run(work()) == "timeout"


def fail_with(reason: str) -> Callable[..., Any]:
    return lambda response, ground_truth: {"score": 1.0, "reason": reason if response == "bad" else ""}


def test_once_a_reward_has_worked_failures_of_infrastructure_end_no_run_and_are_told():
    reward = total_of(fail_with("infrastructure"), 0.0)
    told = ask(reward, "good", *["bad"] * (2 * WINDOW_ANSWERS))
    assert not any(isinstance(one, RewardsFailed) for one in told)
    assert reward.status().sources == {"sums": {"rewarded": 1, "infrastructure": 2 * WINDOW_ANSWERS}}
    assert [one.count for one in reward.obstacles()] == [2 * WINDOW_ANSWERS]
    told = ask(total_of(fail_with("infrastructure"), 0.0), *["bad"] * FIRST_ANSWERS)
    assert isinstance(told[-1], RewardsFailed) and told[-1].reason == "infrastructure"


def test_a_group_without_a_reward_is_tried_again_then_dropped_and_never_trained(
    tmp_path: Path,
):
    """All answers but one meet a sandbox that is too slow, and give the zero that they would be."""

    def score(response: str, ground_truth: Any) -> Any:
        return {"score": 0.0, "reason": "timeout"} if next(calls) > 1 else 1.0

    calls: Iterator[int] = iter(range(1, 1_000_000))
    with open_stage(tmp_path, total_of(score)) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.census().dropped.get("timeout"), "a dropped group")
        census = stage.census()
        assert census.stored_groups == census.trained == census.residue == 0
        assert set(census.dropped) == {"timeout"}
        assert census.counters["failures/timeout"] >= 3 * census.dropped["timeout"]


# Zeros that look like faults


def watch_of(*rewards: tuple[float, str]) -> ZeroWatch:
    watch = ZeroWatch()
    for value, reason in rewards:
        watch.add_scored("sums", value, reason)
    return watch


def told_by(watch: ZeroWatch) -> str:
    found = watch.obstacles()
    assert all(one.cause is Cause.FAULTY_ZEROS and one.cause in ADVISORY for one in found)
    return found[0].reason if found else ""


def test_fake_zeros_that_set_in_are_told_as_a_run_of_a_peer_had_them():
    """1,172 of 1,280 rewards of twenty steps were a sandbox's failures, after sixty steps at about a half."""
    watch = watch_of(*[(float(number % 5 < 2), "") for number in range(60 * 64)])
    assert told_by(watch) == ""
    first = None
    for number in range(1280):
        watch.add_scored("sums", float(number % 12 == 0), "")
        if first is None and told_by(watch):
            first = number + 1
    assert first is not None and first <= 2 * NEWEST, "within eight of the twenty steps"
    assert "data source 'sums': 235 of the last 256 rewards are 0 (235 unsaid), 60% were before" in told_by(
        watch
    )
    for number in range(2 * NEWEST):
        watch.add_scored("sums", float(number % 5 < 2), "")
    assert told_by(watch) == "", "it is over when the rewards are as they were"


@pytest.mark.parametrize("reason", ["wrong_answer", "no_answer", "truncated", "unsaid", "", "too short"])
def test_a_task_that_is_hard_from_the_start_raises_no_alarm(reason: str):
    watch = watch_of(*[(0.0, reason)] * 4000)
    assert told_by(watch) == ""
    learned = watch_of(*[(float(number % 4000 < number // 2), reason) for number in range(4000)])
    assert told_by(learned) == ""


@pytest.mark.parametrize("reason", ["UnknownError", "sandbox timed out", "HTTP 503", "Connection reset"])
def test_zeros_whose_reason_reads_like_a_fault_are_told_from_the_start(reason: str):
    watch = watch_of(*[(float(number % 4 < 3), reason) for number in range(NEWEST - 1)])
    assert told_by(watch) == "", "of too few nothing is said"
    watch.add_scored("sums", 0.0, reason)
    assert f"64 of the last 256 rewards are 0 for reasons like {reason!r}" in told_by(watch)
    few = watch_of(*[(float(number % 6 > 0), reason) for number in range(NEWEST)])
    assert told_by(few) == ""


def test_sources_are_judged_apart_and_too_many_are_counted_together():
    watch = ZeroWatch()
    for number in range(4 * MAX_USUAL):
        watch.add_scored("good", 1.0, "")
        watch.add_scored("bad", float(number < 2 * MAX_USUAL), "")
    assert "'bad'" in told_by(watch) and "'good'" not in told_by(watch)
    for number in range(2 * MAX_SOURCES):
        watch.add_scored(f"source {number}", 1.0, "")
    assert len(watch.counts()) == MAX_SOURCES + 1
    assert watch.counts()["other"] == {"rewarded": MAX_SOURCES + 2}


def test_the_alarm_is_an_obstacle_of_the_replica_and_evaluations_raise_none():
    prompt = Prompt(7, "2+2=", "4", "", {})
    faulty = TotalReward(total_of(lambda *_: {"score": 0.0, "reason": "SandboxError"})._parts, ErrorRate(1.0))

    async def work(reward: TotalReward) -> list[str]:
        for _ in range(NEWEST):
            await reward.score(Answer(prompt, "5", "stop", 2))
        return [one.reason for one in reward.obstacles()]

    (told,) = asyncio.run(work(faulty))
    assert told.startswith("data source 'data': 256 of the last 256 rewards are 0 for reasons like 'Sandb")
    assert asyncio.run(work(faulty.for_evaluation())) == []
    assert json.dumps(faulty.status().sources) == '{"data": {"other": 256}}'
