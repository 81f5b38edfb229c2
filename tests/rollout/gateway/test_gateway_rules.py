"""The gateway without an engine: what follows on what, what is recorded, who may come."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import MAX_REWARD_PARTS, decode_group, encode_group
from asyncrl.core.staleness import Span
from asyncrl.core.states import Reason
from rollout_service.data.prompts import Prompt, PromptSet, TokenizedPrompt
from rollout_service.engine.protocol import EngineDied
from rollout_service.gateway import sessions
from rollout_service.gateway.app import Routes, build_app
from rollout_service.gateway.conversation.history import Asked, asked_in_chat
from rollout_service.gateway.conversation.session import Session
from rollout_service.gateway.conversation.transcript import Transcript, Turn, common_prompt
from rollout_service.gateway.gateway import Gateway, GatewaySettings
from rollout_service.gateway.keys import VARIABLE, GatewayKey, read_key
from rollout_service.gateway.parsers import Parsers
from rollout_service.gateway.refusal import EpisodeFailed, NobodyCame, Refusal
from rollout_service.gateway.rules import Rules
from rollout_service.gateway.serving.apis import Serving
from rollout_service.gateway.sessions import SessionManager

RULES = Rules(run_seed=0, group_size=2, temperature=0.7, max_tokens=20, max_prompt_tokens=10)
HELLO = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}


def chat(*messages: dict[str, Any], **more: Any) -> Asked:
    return asked_in_chat(messages, more)


def turn(prompt: tuple[int, ...], ids: tuple[int, ...], version: int = 1, end: str = "stop") -> Turn:
    return Turn(prompt, ids, (-0.5,) * len(ids), (Span(version, 0, len(ids)),), end, "text")


# What is recorded


def test_a_trajectory_masks_what_the_model_did_not_sample_and_covers_it_by_the_turn_before():
    transcript = Transcript()
    transcript.add(turn((1, 2, 3), (4, 5), version=7, end="length"))
    transcript.add(turn((1, 2, 3, 4, 5, 6, 6), (8,), version=9))
    trajectory = transcript.trajectory(2, 0.5, {"right": 1.0})
    assert trajectory.response_ids.tolist() == [3, 4, 5, 6, 6, 8]
    assert trajectory.loss_mask.tolist() == [0, 1, 1, 0, 0, 1]
    assert trajectory.logprobs.tolist() == [0.0, -0.5, -0.5, 0.0, 0.0, -0.5]
    assert trajectory.spans == (Span(7, 0, 5), Span(9, 5, 6))
    assert (trajectory.num_turns, trajectory.finish_reason) == (2, "stop")
    assert dict(trajectory.reward_parts) == {"right": 1.0}


def test_turns_under_one_version_have_one_span():
    transcript = Transcript()
    transcript.add(turn((1,), (2,)))
    transcript.add(turn((1, 2, 3), (4,)))
    assert transcript.trajectory(1, 0.0).spans == (Span(1, 0, 3),)


def test_a_turn_that_does_not_go_on_from_the_sampled_ids_is_a_programmers_mistake():
    transcript = Transcript()
    transcript.add(turn((1,), (2,)))
    with pytest.raises(AssertionError):
        transcript.add(turn((1, 9, 3), (4,)))


def test_the_common_prompt_ends_where_the_first_prompts_part():
    assert common_prompt([(1, 2, 3), (1, 2, 4, 5)]) == 2
    assert common_prompt([(1, 2), (1, 2, 3)]) == 2
    assert common_prompt([(1,), (2,)]) == 0


# Who may come


def test_without_a_key_the_gateway_stays_on_this_machine():
    assert read_key({}, "127.0.0.1").admits("")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7 without a key.*ASYNCRL_GATEWAY_KEY"):
        read_key({}, "10.0.0.7")
    with pytest.raises(ConfigError, match="fewer than 16"):
        read_key({VARIABLE: "secret"}, "127.0.0.1")


def test_a_key_admits_itself_alone_and_is_not_printed():
    key = read_key({VARIABLE: "a-long-enough-secret"}, "10.0.0.7")
    assert key.admits("a-long-enough-secret")
    assert not any(key.admits(given) for given in ("", "a-long-enough-secres", "schlüssel"))
    assert "secret" not in repr(key)
    assert GatewayKey("").admits("anything")


def test_a_refusal_keeps_its_status_over_a_pickle():
    refused = pickle.loads(pickle.dumps(Refusal("no", status=410, code="gone")))
    assert (str(refused), refused.status, refused.code) == ("no", 410, "gone")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"rollout": {"gateway": {}, "engine": "scripted"}}, "has no gateway"),
        ({"rollout": {"gateway": {}}, "algorithm": {"advantage": "remax"}}, "greedy"),
        ({"rollout": {"gateway": {}, "response_tokens": "lognormal:1:8"}}, "response_tokens does nothing"),
        ({"rollout": {"gateway": {}, "stop": ["."]}}, "stop does nothing"),
        (
            {"rollout": {"gateway": {}}, "reward": {"fn": "f", "overlong": {"buffer_tokens": 9}}},
            "reward.overlong does nothing",
        ),
    ],
)
def test_what_agents_cannot_give_is_a_conflict(more: dict[str, Any], told: str):
    base = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}
    with pytest.raises(ValueError, match=told):
        Config.model_validate({**base, **more})


# Sessions


def make_desk(deadline_s: float = 20.0) -> tuple[SessionManager, list[str]]:
    prompt = TokenizedPrompt(0, Prompt(0, "hello", "truth", "", {}), np.asarray([1], dtype=np.int32))
    aborted: list[str] = []

    async def abort(ids: list[str]) -> None:
        aborted.extend(ids)

    return SessionManager(PromptSet((prompt,), "digest"), RULES, deadline_s, abort), aborted


def test_a_manager_is_idle_from_when_its_last_agent_has_gone():
    async def come_and_go() -> None:
        manager, _ = make_desk()
        await asyncio.sleep(0.05)
        assert manager.idle_s >= 0.05, "nobody has ever come"
        waiting = asyncio.create_task(manager.open(60.0))
        await asyncio.sleep(0.02)
        assert manager.idle_s == 0.0, "an agent waits"
        waiting.cancel()
        began = time.monotonic()
        with pytest.raises(Refusal, match="no group was admitted"):
            await manager.open(0.05)
        assert manager.idle_s <= time.monotonic() - began - 0.05, "it went at the end of its wait"

    asyncio.run(come_and_go())


GRANT = LeaseGrant(ticket=5, attempt=1, source=0, pass_number=0, index=0, seed=0, lease_s=10.0)


def speak(session: Session, prompt: tuple[int, ...] = (1, 2), ids: tuple[int, ...] = (3,)) -> None:
    call = session.begin()
    call.ask(chat(HELLO))
    call.record(turn(prompt, ids))
    call.end()


def play(deadline_s: float, script: Any) -> Any:
    """Run `script(manager, first session, the group's task)` on a manager with one lease."""

    async def run() -> Any:
        manager, aborted = make_desk(deadline_s)
        opening = asyncio.create_task(manager.open(5.0))
        await asyncio.sleep(0)
        assert manager.num_groups_wanted == 1
        group = asyncio.create_task(manager.run(GRANT))
        first = await opening
        assert manager.num_groups_wanted == 0
        await script(manager, first, group)
        assert manager.status("http://here").sessions == 0
        return aborted

    return asyncio.run(run())


def test_a_group_is_complete_when_its_last_sibling_has_its_reward():
    async def script(manager: SessionManager, first: Session, group: Any) -> None:
        second = await manager.open(0.0)
        assert {first.id, second.id} == {"5.1.0", "5.1.1"}
        speak(first)
        speak(second, (1, 2, 9), (4, 5))
        first.close(1.0, {})
        first.close(1.0, {})  # its answer may have been lost
        with pytest.raises(Refusal, match="another reward"):
            first.close(0.5, {})
        with pytest.raises(Refusal, match="reward was given"):
            first.begin()
        assert not group.done()
        second.close(0.0, {})
        found = await group
        assert (found.ticket, found.attempt, found.prompt_ids.tolist()) == (5, 1, [1, 2])
        assert [t.response_ids.tolist() for t in found.trajectories] == [[3], [9, 4, 5]]
        assert [t.loss_mask.tolist() for t in found.trajectories] == [[1], [0, 1, 1]]
        with pytest.raises(Refusal, match="its group is complete"):
            manager.find(first.key)

    play(20.0, script)


def test_missing_siblings_end_the_group_at_its_deadline_and_what_is_in_flight():
    async def script(manager: SessionManager, first: Session, group: Any) -> None:
        call = first.begin()
        call.request_id = "in-flight"
        with pytest.raises(EpisodeFailed, match=r"siblings_missing: 0 of 2 .* 1 were opened"):
            await group
        with pytest.raises(Refusal, match="has ended: siblings_missing") as refused:
            manager.find(first.key)
        assert refused.value.status == 410

    assert play(0.05, script) == ["in-flight"]


def test_a_changed_history_ends_the_group_at_once():
    async def script(manager: SessionManager, first: Session, group: Any) -> None:
        speak(first)
        with pytest.raises(Refusal, match="not one that this session recorded"):
            first.begin().ask(chat(MORE))
        with pytest.raises(EpisodeFailed, match=r"history_changed: session 5\.1\.0"):
            await group

    play(20.0, script)


def test_a_session_has_one_call_at_a_time_and_no_reward_without_an_answer():
    async def script(manager: SessionManager, first: Session, group: Any) -> None:
        with pytest.raises(Refusal, match="no answer"):
            first.close(1.0, {})
        call = first.begin()
        for attempt in (lambda: first.begin(), lambda: first.close(1.0, {})):
            with pytest.raises(Refusal, match="in flight") as refused:
                attempt()
            assert refused.value.status == 409
        call.end()
        speak(first)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        with pytest.raises(Refusal, match="no longer this replica's"):
            manager.find(first.key)

    play(20.0, script)


def test_a_client_that_has_read_its_answer_s_end_may_go_on_before_the_server_is_done_with_it():
    said = {"role": "assistant", "content": "text"}

    async def script(manager: SessionManager, first: Session, group: Any) -> None:
        for prompt, messages in (((1, 2), [HELLO]), ((1, 2, 3, 4), [HELLO, said, MORE])):
            call = first.begin()
            call.ask(chat(*messages))
            call.record(turn(prompt, (3,)))
        first.close(1.0, {})
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    play(20.0, script)


def test_siblings_whose_prompts_have_nothing_in_common_are_no_group():
    async def script(manager: SessionManager, first: Session, group: Any) -> None:
        second = await manager.open(0.0)
        speak(first, (1, 2))
        speak(second, (2, 1))
        for session in (first, second):
            session.close(1.0, {})
        with pytest.raises(EpisodeFailed, match="prompts_differ"):
            await group

    play(20.0, script)


def test_nobody_gets_a_session_without_a_lease_or_while_draining():
    async def run() -> None:
        manager, _ = make_desk()
        asked: list[int] = []
        manager.on_demand = lambda: asked.append(manager.num_groups_wanted)
        with pytest.raises(Refusal, match="no group was admitted") as refused:
            await manager.open(0.01)
        assert (refused.value.status, asked, manager.num_groups_wanted) == (503, [1], 0)
        waiting = asyncio.create_task(manager.open(5.0))
        await asyncio.sleep(0)
        manager.refuse_sessions()
        for attempt in (waiting, manager.open(5.0)):
            with pytest.raises(Refusal, match="about to stop"):
                await attempt
        with pytest.raises(Refusal, match="missing or wrong"):
            manager.find("nobody's")

    asyncio.run(run())


def test_a_drain_hands_back_the_groups_that_no_agent_can_complete_any_more():
    async def script(manager: SessionManager, first: Session, group: Any) -> None:
        siblings = [first, await manager.open(0.0)]
        half_open = asyncio.create_task(manager.run(msgspec.structs.replace(GRANT, ticket=6)))
        await asyncio.sleep(0)
        alone = await manager.open(0.0)
        manager.refuse_sessions()
        with pytest.raises(asyncio.CancelledError):  # the farewell of the replica releases its lease
            await half_open
        with pytest.raises(Refusal, match="has ended: draining"):
            manager.find(alone.key)
        for session in siblings:
            speak(session)
            session.close(1.0, {})
        assert (await group).ticket == 5

    play(20.0, script)


@pytest.mark.parametrize("deadline_s", [0.05, 20.0])
def test_a_group_that_no_agent_opened_is_no_failed_attempt(
    deadline_s: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sessions, "UNOPENED_S", 0.05)

    async def run() -> None:
        manager, _ = make_desk(deadline_s)
        with pytest.raises(NobodyCame, match="0 were opened"):
            await asyncio.wait_for(manager.run(GRANT), 5.0)
        group = asyncio.create_task(manager.run(GRANT))
        await asyncio.sleep(0)
        manager.take_back(await manager.open(0.0))
        with pytest.raises(NobodyCame):
            await asyncio.wait_for(group, 5.0)

    asyncio.run(run())


def test_a_sample_that_was_taken_back_goes_to_the_next_agent():
    async def script(manager: SessionManager, first: Session, group: Any) -> None:
        second = await manager.open(0.0)
        waiting = asyncio.create_task(manager.open(5.0))
        await asyncio.sleep(0)
        manager.take_back(first)
        third = await waiting
        assert (third.id, third.key != first.key) == ("5.1.0", True)
        for session, ids in ((second, (4,)), (third, (3,))):
            speak(session, ids=ids)
            session.close(1.0, {})
        assert [t.response_ids.tolist() for t in (await group).trajectories] == [[3], [4]]
        manager.take_back(third)  # too late: its group has ended

    play(20.0, script)


# Strangers at the door


def make_app(manager: SessionManager) -> Any:
    serving = Serving(manager, has_tools=True)
    return build_app(Routes(manager, serving, GatewayKey(""), lambda: "http://here", lambda: True))


def visit(script: Any) -> None:
    """Run `script(manager, post)` where `post(path, body, key)` is a request to the app without an engine."""

    async def run() -> None:
        manager, _ = make_desk()
        transport = httpx.ASGITransport(make_app(manager))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:

            async def post(path: str, body: str, key: str = "") -> httpx.Response:
                headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
                return await client.post(path, content=body.encode(), headers=headers)

            await script(manager, post)

    asyncio.run(run())


async def open_two(manager: SessionManager, post: Any) -> tuple[asyncio.Task[Any], list[str]]:
    """Return a group's task, and the keys of its two sessions, each with an answer."""
    group = asyncio.create_task(manager.run(GRANT))
    await asyncio.sleep(0)
    keys = [(await post("/sessions", "{}")).json()["key"] for _ in range(2)]
    for key in keys:
        speak(manager.find(key))
    return group, keys


def part(name: str, value: float = 1) -> str:
    return json.dumps({"reward": 1, "parts": {name: value}})


BAD_REWARDS = {
    "a lone surrogate": r'{"error": "\ud800"}',
    "a lone surrogate as a name": r'{"reward": 1, "parts": {"\ud800": 1}}',
    "infinite in float32": '{"reward": 1e300}',
    "infinite in any form": '{"reward": 1' + "0" * 400 + "}",
    "an infinite part": part("a", -1e39),
    "no name": part(""),
    "a long name": part("x" * 65),
    "a name that cannot be printed": part("a\nb"),
    "too many": json.dumps({"reward": 1, "parts": {str(n): 1 for n in range(MAX_REWARD_PARTS + 1)}}),
}


@pytest.mark.parametrize("body", BAD_REWARDS.values(), ids=BAD_REWARDS.keys())
def test_a_reward_that_cannot_be_pushed_is_refused_and_the_session_stays_open(body: str):
    async def script(manager: SessionManager, post: Any) -> None:
        group, keys = await open_two(manager, post)
        refused = await post("/reward", body, keys[0])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, 400), refused.text
        for key in keys:
            assert (await post("/reward", part("é" * 64, 3e38), key)).json() == {"closed": True}
        found = decode_group([bytes(frame) for frame in encode_group(await group)])
        assert found.rewards == [1.0, 1.0]

    visit(script)


def test_the_limit_of_parts_holds_for_all_siblings_together():
    async def script(manager: SessionManager, post: Any) -> None:
        group, keys = await open_two(manager, post)
        most = {str(number): 1 for number in range(MAX_REWARD_PARTS)}
        assert (await post("/reward", json.dumps({"reward": 1, "parts": most}), keys[0])).status_code == 200
        assert "33 reward parts" in (await post("/reward", part("one more"), keys[1])).text
        assert (await post("/reward", part("0"), keys[1])).status_code == 200
        decode_group([bytes(frame) for frame in encode_group(await group)])

    visit(script)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": "no disk"}, Reason.ENVIRONMENT),
        ({"error": "no disk", "reason": "infrastructure"}, Reason.INFRASTRUCTURE),
        ({"reward": 0.0, "reason": "timeout"}, Reason.TIMEOUT),
    ],
)
def test_an_agent_says_why_there_is_no_reward(body: dict[str, Any], reason: Reason):
    async def script(manager: SessionManager, post: Any) -> None:
        group, keys = await open_two(manager, post)
        refused = await post("/reward", json.dumps({"error": "no", "reason": "wrong_answer"}), keys[0])
        assert refused.status_code == 400 and "one of infrastructure, timeout" in refused.text
        assert (await post("/reward", json.dumps(body), keys[0])).status_code == 200
        with pytest.raises(EpisodeFailed, match="agent_failed") as failed:
            await group
        assert failed.value.reason is reason

    visit(script)


def test_the_reason_of_a_reward_of_zero_is_the_trajectory_s():
    async def script(manager: SessionManager, post: Any) -> None:
        group, keys = await open_two(manager, post)
        for key, reward in zip(keys, (0.0, 1.0), strict=True):
            body = json.dumps({"reward": reward, "reason": "wrong_\nanswer"})
            assert (await post("/reward", body, key)).status_code == 200
        assert [one.reason for one in (await group).trajectories] == [Reason.WRONG, ""]

    visit(script)


def test_a_reward_for_a_group_that_has_just_ended_is_not_called_taken():
    async def script(manager: SessionManager, post: Any) -> None:
        group, keys = await open_two(manager, post)
        session = manager.find(keys[0])
        session.group.fail(EpisodeFailed("agent_failed: a sibling"))
        with pytest.raises(Refusal, match="group has ended"):
            session.close(1.0, {})
        with pytest.raises(EpisodeFailed):
            await group
        assert (await post("/reward", part("a"), keys[0])).status_code == 410

    visit(script)


@pytest.mark.parametrize("has_group", [False, True])
def test_an_agent_that_hangs_up_while_it_waits_gets_no_session(has_group: bool):
    async def run() -> None:
        manager, _ = make_desk()
        left, sent = asyncio.Event(), []
        said = [{"type": "http.request", "body": b'{"wait_s": 30}', "more_body": False}]

        async def receive() -> Any:
            if said:
                return said.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/sessions", "query_string": b""}
        asking = asyncio.create_task(make_app(manager)({**scope, "headers": headers}, receive, send))
        while manager.num_groups_wanted == 0:
            await asyncio.sleep(0)
        group = asyncio.create_task(manager.run(GRANT)) if has_group else None
        left.set()
        await asyncio.wait_for(asking, 5.0)
        assert sent[0]["status"] == 499
        assert (manager.num_groups_wanted, manager.status("http://here").sessions) == (0, 0)
        if group is not None:
            assert (await manager.open(0.0)).sample == 0
            group.cancel()

    asyncio.run(run())


def test_a_path_that_is_not_served_is_answered_with_those_that_are():
    async def script(manager: SessionManager, post: Any) -> None:
        for path in ("/v1/embeddings", "/sessions/a-key/v1/embeddings"):
            answer = await post(path, "{}")
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (404, "not_found")
            assert "the gateway has /v1/chat/completions" in error["message"]
            assert "a-key" not in error["message"]

    visit(script)


def test_an_anthropic_client_reads_its_own_form_of_error():
    async def script(manager: SessionManager, post: Any) -> None:
        group, (key, _) = await open_two(manager, post)
        thread = {"thread": {"type": "create"}}
        for body, status, code in ({}, 400, "BadRequestError"), (thread, 400, "thread_unsupported_request"):
            refused = await post("/v1/messages", json.dumps(body), key)
            error = refused.json()["error"]
            assert (refused.status_code, refused.json()["type"], error["type"]) == (status, "error", code)
            assert error["details"] == {"error_code": code}
        assert (await post("/v1/messages", "{}", "wrong")).json()["error"]["type"] == "unauthorized"
        assert not manager.find(key).calls, "a refused call is over"
        group.cancel()

    visit(script)


def test_an_engine_that_died_between_calls_is_noticed():
    died = EngineDied("vLLM died: RuntimeError: head_dim=16")
    engine: Any = SimpleNamespace(client=SimpleNamespace(errored=False), death=lambda: died)

    async def run() -> None:
        manager, _ = make_desk()
        settings = GatewaySettings("127.0.0.1", 0, 20.0, Parsers())
        gateway = Gateway(settings, RULES, GatewayKey(""), manager._prompts, engine, meter=engine)
        watching = asyncio.create_task(gateway.watch())
        await asyncio.sleep(0)
        assert not watching.done()
        engine.client.errored = True
        with pytest.raises(EngineDied):
            await asyncio.wait_for(watching, 5.0)

    asyncio.run(run())
