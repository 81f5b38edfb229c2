"""A judge behind an OpenAI-compatible server: questions, verdicts, faults, cache and budget."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.core.config.tree import RewardSection
from asyncrl.core.errors import ConfigError
from rollout_service.data.prompts import Prompt
from rollout_service.rewards.registry import load_reward
from rollout_service.rewards.score import Answer, RewardError
from rollout_service.rewards.served import posting
from rollout_service.rewards.served.judge import JudgeReward, JudgeSettings
from rollout_service.tasks.tiny_text import make_folder
from tests.rollout.rewards.judging import PROMPT, answer, reward_of
from tests.waiting import wait_for

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def completion(text: str, tokens: int = 10) -> web.Response:
    message = {"role": "assistant", "content": text}
    return web.json_response({"choices": [{"message": message}], "usage": {"total_tokens": tokens}})


async def value_of(judge: JudgeReward, response: str, prompt: Prompt = PROMPT) -> Any:
    """Return the value, or the reason and the message of a failure."""
    try:
        return (await judge.value(answer(response, prompt))).value
    except RewardError as error:
        return str(error.reason), error.message


def ask(
    handler: Handler,
    responses: Sequence[str],
    deadline_s: float = 20.0,
    at_once: bool = False,
    **settings: Any,
) -> list[Any]:
    async def run() -> list[Any]:
        async with serving(handler) as url:
            judge = JudgeReward("judge", JudgeSettings(url, "judge-7b", **settings), deadline_s)
            try:
                if at_once:
                    return await asyncio.gather(*(value_of(judge, one) for one in responses))
                return [await value_of(judge, one) for one in responses]
            finally:
                await judge.close()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posting, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", "the-key")


def test_a_judge_is_asked_with_task_reference_and_answer_and_its_last_score_counts():
    asked = []

    async def judge(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer the-key"
        asked.append(await request.json())
        return completion("Score: 3 was my first thought.\nScore: 7")

    assert ask(judge, ["{ground_truth} is four"], api_key_env="JUDGE_KEY") == [0.7]
    ((message,),) = [one["messages"] for one in asked]
    assert asked[0] | {"messages": []} == {
        "model": "judge-7b",
        "messages": [],
        "temperature": 0.0,
        "max_tokens": 512,
    }
    assert "Task:\n2+2=\n" in message["content"] and "Reference answer:\n4\n" in message["content"]
    assert "Answer:\n{ground_truth} is four\n" in message["content"], "what a model wrote is no place"


def test_a_prompt_and_a_parse_rule_of_ones_own():
    async def judge(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        assert text == "Is user: 2+2? answered by 5? (4)"
        return completion("<grade>-0.5</grade>")

    chat = Prompt(7, ({"role": "user", "content": "2+2?"},), "4", "sums", {})
    settings = {"prompt": "Is {prompt} answered by {response}? ({ground_truth})", "scale": 1.0}

    async def run() -> Any:
        async with serving(judge) as url:
            made = JudgeReward("judge", JudgeSettings(url, "m", parse="<grade>(.*?)</grade>", **settings))
            score = await made.value(Answer(chat, "5", "stop", 1))
            await made.close()
            return score.value, score.reason

    assert asyncio.run(run()) == (-0.5, "wrong_answer")


@pytest.mark.parametrize(
    ("verdict", "value"),
    [
        ("[true, false, true]", 0.75),
        ("First [1] says true.\n[false, false, false]", 0.0),
        ("```json\n[true, true, true]\n```", 1.0),
    ],
)
def test_a_rubric_is_the_weighted_share_of_its_criteria_that_hold(verdict: str, value: float):
    async def judge(request: web.Request) -> web.Response:
        assert "1. right\n2. short\n3. polite\n" in (await request.json())["messages"][0]["content"]
        return completion(verdict)

    assert ask(judge, ["4"], rubric={"right": 2, "short": 1, "polite": 1}) == [value]


UNREADABLE = ["no number here", "", "[true, false]", "[true, 1, 0]", "Score: 7", "[true, true, tr"]


@pytest.mark.parametrize("verdict", UNREADABLE)
def test_a_verdict_that_cannot_be_read_is_asked_for_again_and_then_a_failure(verdict: str):
    calls = []

    async def judge(request: web.Request) -> web.Response:
        calls.append(1)
        return completion(verdict)

    ((reason, message),) = ask(judge, ["4"], rubric=["right", "short", "polite"], attempts=3)
    assert reason == "reward" and len(calls) == 3
    assert "did not answer in 3 attempts: a verdict without a score" in message


@pytest.mark.parametrize("verdict", ["It is no score: 3, it is better. Score: 1", "First [true, true] and"])
def test_a_verdict_that_was_cut_at_its_token_limit_is_none(verdict: str):
    async def judge(request: web.Request) -> web.Response:
        choice = {"message": {"role": "assistant", "content": verdict}, "finish_reason": "length"}
        return web.json_response({"choices": [choice]})

    settings: dict[str, Any] = {"rubric": ["right", "short"]} if "[" in verdict else {}
    ((reason, message),) = ask(judge, ["4"], attempts=2, **settings)
    assert reason == "reward" and "a verdict without a score" in message


def raw(body: str, status: int = 200) -> web.Response:
    return web.Response(status=status, text=body, content_type="application/json")


async def cut_short(request: web.Request) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Length": "500"})
    await reply.prepare(request)
    await reply.write(b'{"choices": [{"mess')
    assert request.transport is not None
    request.transport.close()
    return reply


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


FAULTS: dict[str, Callable[[web.Request], Any]] = {
    "500": lambda _: raw("", 500),
    "429": lambda _: web.Response(status=429, headers={"Retry-After": "0"}),
    "503 with a page": lambda _: raw("<html>", 503),
    "cut short": cut_short,
    "no choices": lambda _: raw('{"choices": []}'),
    "no text": lambda _: raw('{"choices": [{"message": {"content": null}}]}'),
    "a list": lambda _: raw("[]"),
}


async def fail_by(fault: str, request: web.Request) -> web.StreamResponse:
    found = FAULTS[fault](request)
    made: web.StreamResponse = await found if asyncio.iscoroutine(found) else found
    return made


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_costs_an_attempt_and_one_that_stays_is_no_zero(fault: str):
    calls = []

    async def twice(request: web.Request) -> web.StreamResponse:
        calls.append(1)
        return completion("score: 10") if len(calls) == 3 else await fail_by(fault, request)

    assert ask(twice, ["4"], attempts=3) == [1.0]

    async def always(request: web.Request) -> web.StreamResponse:
        return await fail_by(fault, request)

    ((reason, message),) = ask(always, ["4"], attempts=2)
    assert reason == "infrastructure" and "did not answer in 2 attempts" in message


FINAL = [("no JSON", 200), ('{"choices": [{"mess', 200), ("", 401), ("", 403), ("", 404), ("", 405)]
TOO_LONG = '{"error": {"message": "maximum context length is 1024 tokens"}}'
OF_REQUEST = [(TOO_LONG, status) for status in (400, 413, 422)]


@pytest.mark.parametrize(
    ("body", "status", "blamed"),
    [(*case, "infrastructure") for case in FINAL] + [(*case, "reward") for case in OF_REQUEST],
)
def test_what_no_further_attempt_mends_fails_at_once(body: str, status: int, blamed: str):
    """A request that is refused for what it holds says nothing about the server: no source is paused."""
    calls = []

    async def judge(request: web.Request) -> web.Response:
        calls.append(1)
        return raw(body, status)

    ((reason, message),) = ask(judge, ["4"])
    assert reason == blamed and len(calls) == 1
    assert status == 200 or f"status {status}: {body}" in message


def test_a_server_that_hangs_is_given_up_at_the_deadline_as_infrastructure():
    ((reason, message),) = ask(hang, ["4"], deadline_s=0.2)
    assert reason == "infrastructure" and "did not answer within 0.2 s" in message


def test_a_server_that_asks_for_more_time_than_is_left_is_not_waited_for():
    async def judge(request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": "3600"})

    ((reason, message),) = ask(judge, ["4"], deadline_s=60.0)
    assert reason == "infrastructure" and "status 429" in message


def test_the_same_question_is_asked_once_and_failures_are_not_kept():
    asked = []

    async def judge(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        asked.append(text[text.index("Answer:\n") + 8 :].split("\n")[0])
        return raw("", 404) if asked == ["bad"] else completion("score: 5")

    found = ask(judge, ["bad", "bad", "good", "bad", "good"])
    assert found[0][0] == "infrastructure" and found[1:] == [0.5] * 4
    assert asked == ["bad", "bad", "good"]
    asked[:] = ["begun"]
    assert ask(judge, ["x"] * 20, at_once=True) == [0.5] * 20
    assert asked == ["begun", "x"]
    asked[:] = ["begun"]
    assert ask(judge, ["a", "b", "a", "c", "b", "a"], cache=2) == [0.5] * 6
    assert asked == ["begun", "a", "b", "c", "b", "a"], "the least recently used goes first"


def test_no_more_requests_are_under_way_than_allowed():
    running, most = 0, 0

    async def judge(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return completion("score: 5")

    assert ask(judge, [str(number) for number in range(20)], at_once=True, concurrency=3) == [0.5] * 20
    assert most == 3


@pytest.mark.parametrize(
    ("budget", "name"),
    [({"max_calls": 3}, "max_calls is 3"), ({"max_total_tokens": 25}, "max_total_tokens is 25")],
)
def test_a_budget_that_is_used_up_is_a_failure_with_that_reason_and_never_a_zero(budget: Any, name: str):
    calls = []

    async def judge(request: web.Request) -> web.Response:
        calls.append(1)
        return completion("score: 5", tokens=10)

    found = ask(judge, ["1", "2", "3", "4", "1"], **budget)
    assert found[:3] == [0.5] * 3 and found[4] == 0.5, "verdicts that are known stay"
    assert found[3] == ("budget", f"the budget of the judge 'judge' is used up: {name}")
    assert len(calls) == 3


def test_attempts_that_failed_use_the_budget_too():
    async def judge(request: web.Request) -> web.Response:
        return raw("", 500)

    ((reason, _),) = ask(judge, ["4"], max_calls=2)
    assert reason == "budget"


def test_what_is_spent_in_a_runs_folder_counts_for_all_processes_and_starts(tmp_path: Path):
    calls = []

    async def judge(request: web.Request) -> web.Response:
        calls.append(1)
        return completion("score: 5", tokens=10)

    async def run() -> list[Any]:
        async with serving(judge) as url:
            fn = {"fn": "judge", "base_url": url, "model": "m", "max_calls": 5, "max_total_tokens": 30}
            section = RewardSection.model_validate({"fn": fn, "max_error_rate": 1.0})
            found = []
            for number in range(5):  # two replicas side by side, then one that was started again, and so on
                reward = load_reward(section, run_dir=tmp_path / "run" / "rollout")
                other = load_reward(section, run_dir=tmp_path / "run" / "rollout")
                for one in (reward, other):
                    try:
                        found.append((await one.score(answer(str(number)))).value)
                    except RewardError as error:
                        found.append(str(error.reason))
                    await one.close()
            return found

    assert asyncio.run(run()) == [0.5] * 3 + ["budget"] * 7
    assert len(calls) == 3
    assert [path.name for path in (tmp_path / "run" / "rollout").iterdir()] == ["judge-judge.spent"]


def test_two_processes_that_spend_at_once_are_both_counted(tmp_path: Path):
    mine, others = (JudgeReward("j", JudgeSettings("http://a/v1", "m", max_calls=9)) for _ in range(2))
    mine.count_in(tmp_path)
    others.count_in(tmp_path)
    thread = threading.Thread(target=others._spend)
    with mine._counting():
        thread.start()
        thread.join(0.2)  # it waits
        mine.num_calls += 1
    thread.join()
    assert others.num_calls == 2


def test_a_budget_whose_count_cannot_be_kept_is_not_spent(tmp_path: Path):
    async def judge(request: web.Request) -> web.Response:
        raise AssertionError("it is asked nothing")

    async def run() -> Any:
        async with serving(judge) as url:
            made = JudgeReward("a/b", JudgeSettings(url, "m", max_calls=3))
            made.count_in(tmp_path)
            (tmp_path / "judge-a%2Fb.spent").mkdir()
            found = await value_of(made, "4")
            await made.close()
            return found

    reason, message = asyncio.run(run())
    assert reason == "infrastructure" and "what the judge 'a/b' has spent cannot be counted" in message


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no address": ({"model": "m"}, "needs 'base_url'"),
    "no model": ({"base_url": "http://a/v1"}, "needs 'model'"),
    "unknown": ({"tone": "calm"}, "takes no argument 'tone'"),
    "no key": ({"api_key_env": "NO_SUCH_KEY"}, r"\$NO_SUCH_KEY, which is not set"),
    "password": ({"base_url": "http://a:b@c/v1"}, "names no host, or a user"),
    "no place": ({"prompt": "Judge."}, "a place for the answer"),
    "two groups": ({"parse": "(a)(b)"}, "has 2 groups"),
    "no expression": ({"parse": "("}, "is no regular expression"),
    "no budget": ({"max_calls": 0}, "'max_calls' of a judge must be"),
    "weights": ({"rubric": {"right": 0}}, "numbers above 0"),
    "deadline": ({"deadline_s": 0}, "'deadline_s' of the reward 'judge' must be"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_judge_that_cannot_be_used_is_refused_before_anything_starts(case: str):
    given, said = BAD_SETTINGS[case]
    whole = (
        {}
        if case.startswith("no address") or case == "no model"
        else {"base_url": "http://a/v1", "model": "m"}
    )
    with pytest.raises(ConfigError, match=said):
        reward_of({"fn": "judge", **whole, **given})


def test_a_judge_is_a_part_like_others_and_its_failure_fails_the_answer():
    async def judge(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        return completion("score: 5") if "Answer:\n4\n" in text else raw("", 404)

    async def run() -> Any:
        async with serving(judge) as url:
            fn = ["exact_match", {"fn": "judge", "base_url": url, "model": "m", "weight": 0.5}]
            reward = reward_of(fn, max_error_rate=1.0)
            try:
                score = await reward.score(answer("4"))
                with pytest.raises(RewardError, match="status 404"):
                    await reward.score(answer("5"))
                return score.value, score.parts
            finally:
                await reward.close()

    assert asyncio.run(run()) == (1.25, {"exact_match": 1.0, "judge": 0.5})


@contextlib.contextmanager
def vllm_serving(folder: Path) -> Iterator[str]:
    """Run vLLM's own server with a tiny model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "judge-tiny", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--enforce-eager", "--max-model-len", "1024", "--dtype", "float32"]
    log = (folder / "server.log").open("w")
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(
            lambda: server.poll() is not None or "startup complete" in (folder / "server.log").read_text(),
            "vLLM's server",
            deadline_s=400.0,
        )
        assert server.poll() is None, (folder / "server.log").read_text()[-3000:]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60.0)
        log.close()


@pytest.mark.long
def test_a_judge_asks_vllms_own_server(tmp_path: Path):
    """A model of nonsense: its verdict is a digit or a failure, and the same each time."""

    async def work(url: str) -> None:
        settings = JudgeSettings(url, "judge-tiny", parse=r"(\d)", scale=9.0, attempts=2, max_tokens=64)
        judge = JudgeReward("judge", settings, 120.0)
        other = JudgeReward("judge", JudgeSettings(url, "no-such-model"), 120.0)
        try:
            first = await value_of(judge, "4")
            used = judge.num_calls, judge.num_tokens
            assert used[0] >= 1 and used[1] > 100, "the prompt alone has more tokens"
            again = await value_of(judge, "4")
            if isinstance(first, float):
                assert 0.0 <= first <= 1.0 and (judge.num_calls, judge.num_tokens) == used
            else:
                assert first[0] == "reward" and "a verdict without a score: " in first[1]
            assert first == again
            reason, message = await value_of(other, "4")
            assert reason == "infrastructure" and "status 404" in message and "no-such-model" in message
        finally:
            await judge.close()
            await other.close()

    with vllm_serving(make_folder(tmp_path / "model")) as url:
        asyncio.run(work(url))
