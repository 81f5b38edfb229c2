"""A reward server over HTTP: batches, retries, deadlines, and what a server must not say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rollout_service.rewards.score import RewardError
from rollout_service.rewards.served import posting, remote
from rollout_service.rewards.served.posting import JsonServer
from rollout_service.rewards.served.remote import RemoteReward, RemoteSettings
from tests.rollout.rewards.judging import answer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/judge", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/judge"
    finally:
        await runner.cleanup()


def ask(handler: Handler, *responses: str, deadline_s: float = 20.0, batch: int = 4) -> list[Any]:
    """Score responses at once by `handler`; where one fails, (kind, message) stands instead."""

    async def ask_one(reward: RemoteReward, response: str) -> Any:
        try:
            return (await reward.value(answer(response))).value
        except RewardError as error:
            return error.kind, error.message

    async def run() -> list[Any]:
        async with serving(handler) as url:
            reward = RemoteReward("judge", RemoteSettings(url, "JUDGE_KEY"), batch, deadline_s)
            try:
                return await asyncio.gather(*(ask_one(reward, response) for response in responses))
            finally:
                await reward.close()

    return asyncio.run(run())


def reply(scores: Any) -> web.Response:
    return web.json_response({"scores": scores})


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "the-key")
    monkeypatch.setattr(posting, "FIRST_PAUSE_S", 0.01)


def test_answers_go_in_batches_with_all_that_is_known_and_each_gets_its_own_score():
    sizes = []

    async def judge(request: web.Request) -> web.Response:
        told = json.loads(await request.text())["answers"]
        sizes.append(len(told))
        assert request.headers["Authorization"] == "Bearer the-key"
        assert told[0] | {"response": ""} == {
            "prompt": "2+2=",
            "response": "",
            "ground_truth": "4",
            "data_source": "sums",
            "extra_info": {"level": 1},
            "finish_reason": "stop",
            "num_tokens": 2,
            "row": 7,
        }
        return reply([float(one["response"]) for one in told])

    assert ask(judge, *map(str, range(10))) == [float(number) for number in range(10)]
    assert sum(sizes) == 10 and max(sizes) == 4


def test_a_server_that_cannot_at_the_moment_is_asked_again():
    states = iter([500, 503, 429, 200])

    async def judge(request: web.Request) -> web.Response:
        status = next(states)
        return reply([1]) if status == 200 else web.Response(status=status, text="busy")

    assert ask(judge, "4") == [1.0]


def test_a_server_that_drops_the_connection_is_asked_again():
    calls = iter(range(10))

    async def judge(request: web.Request) -> web.Response:
        if next(calls) < 2:
            assert request.transport is not None
            request.transport.close()
        return reply([0.5])

    assert ask(judge, "4") == [0.5]


def advance(seconds: float) -> None:
    """Move the clock of the running loop."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


def test_at_the_deadline_the_last_reason_is_told(monkeypatch: pytest.MonkeyPatch):
    async def judge(request: web.Request) -> web.Response:
        return web.Response(status=500, text="out of order")

    post, left_s = JsonServer._post, list[float]()

    async def post_third_time_late(server: JsonServer, body: Any, timeout_s: float) -> object:
        left_s.append(timeout_s)
        try:
            return await post(server, body, timeout_s)
        finally:
            advance(500.0 if len(left_s) == 3 else 0.0)

    monkeypatch.setattr(JsonServer, "_post", post_third_time_late)
    ((kind, message),) = ask(judge, "4", deadline_s=500.0)
    assert kind == "unreachable" and len(left_s) == 3
    assert "did not answer within 500 s: status 500: out of order" in message


def test_an_answer_that_waits_behind_others_has_its_whole_deadline_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "MAX_RUNNING", 1)

    async def judge(request: web.Request) -> web.Response:
        advance(400.0)
        return reply([1.0])

    assert ask(judge, *"12345678", deadline_s=1000.0, batch=1) == [1.0] * 8


def test_a_server_that_hangs_is_given_up_at_the_deadline():
    async def judge(request: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return reply([1.0])

    ((kind, _),) = ask(judge, "4", deadline_s=0.2)
    assert kind == "unreachable"


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ('{"scores": [1.0]}', 404, "refused", "status 404"),
        ("", 301, "refused", "status 301"),
        ("no json", 200, "refused", "no JSON: no json"),
        ('{"scores": [1.0, 2.0]}', 200, "refused", "no list of 1 `scores`"),
        ('{"score": [1.0]}', 200, "refused", "no list of 1 `scores`"),
        ("[1.0]", 200, "refused", "no list of 1 `scores`"),
        ('{"scores": [NaN]}', 200, "not_finite", "not a finite 32-bit number"),
        ('{"scores": ["1.0"]}', 200, "not_a_number", "a str"),
        ('{"scores": [null]}', 200, "not_a_number", "a NoneType"),
        ('{"scores": [{"error": "I do not know"}]}', 200, "raised", "(row 7): I do not know"),
    ],
)
def test_what_is_no_score_is_an_error_of_its_kind(body: str, status: int, kind: str, said: str):
    calls = []

    async def judge(request: web.Request) -> web.Response:
        calls.append(request)
        return web.Response(status=status, text=body, headers={"Location": "http://elsewhere/"})

    ((found, message),) = ask(judge, "4")
    assert (found, said in message) == (kind, True)
    assert len(calls) == 1


def test_one_answer_without_a_score_leaves_the_others_of_its_batch_theirs():
    async def judge(request: web.Request) -> web.Response:
        told = json.loads(await request.text())["answers"]
        return reply([{"error": "no"} if one["response"] == "bad" else 1.0 for one in told])

    first, bad, last = ask(judge, "4", "bad", "5")
    assert (first, last) == (1.0, 1.0)
    assert bad[0] == "raised"


def test_an_endless_reply_is_cut():
    written: list[int] = []

    async def judge(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            for number in range(1000):
                await response.write(b"1" * (1 << 16))
                written.append(number)
        return response

    ((kind, message),) = ask(judge, "4")
    assert (kind, len(message) < 1000) == ("refused", True)
    assert posting.MAX_REPLY_BYTES >> 16 <= len(written) < 500
