"""Sessions after a restart of their replica: made again from their records, for the agents that come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.staleness import Span
from rollout_service.data.prompts import Prompt, PromptSet, TokenizedPrompt
from rollout_service.gateway.app import _kept
from rollout_service.gateway.conversation.history import Step
from rollout_service.gateway.conversation.session import Session
from rollout_service.gateway.conversation.session_records import SessionJournal
from rollout_service.gateway.conversation.transcript import Turn
from rollout_service.gateway.refusal import Refusal
from rollout_service.gateway.sessions import OpenGroup, SessionManager
from rollout_service.sampling.turn_journal import LeaseLost
from tests.rollout.experts.test_recorded_experts import rows_of
from tests.rollout.gateway.gateway_parts import Agent, Served, Stage, open_gateway_stage
from tests.rollout.gateway.sessions.test_gateway_branches import FORKING, OTHER, Model, choose_history
from tests.rollout.gateway.test_gateway_requests import answer
from tests.rollout.gateway.test_gateway_rules import GRANT, HELLO, MORE


class Replicas:
    """One replica after another with the same group: what each has recorded is the past of the next."""

    def __init__(self, return_s: float = 30.0) -> None:
        self.records: list[bytes] = []
        self.verdict = "stored"
        self._return_s = return_s
        self._attempt = 0

    async def send(self, number: int, versions: tuple[int, int], record: bytes) -> str:
        if self.verdict == "stored":
            assert number == len(self.records) + 1 and versions[0] <= versions[1]
            self.records.append(record)
        return self.verdict

    def start(self) -> SessionManager:
        prompt = TokenizedPrompt(0, Prompt(0, "hello", "truth", "", {}), np.asarray([1], dtype=np.int32))
        prompts = PromptSet((prompt,), "digest")
        return SessionManager(prompts, FORKING, 20.0, lambda _: asyncio.sleep(0), return_s=self._return_s)

    def lease(self, manager: SessionManager) -> asyncio.Task[Group]:
        """Give a manager the group."""
        self._attempt += 1
        grant = msgspec.structs.replace(GRANT, attempt=self._attempt)
        journal = SessionJournal(*grant.key, self.send, list(self.records))
        return asyncio.create_task(manager.run(grant, journal))

    async def restart(self, running: asyncio.Task[Group]) -> tuple[SessionManager, asyncio.Task[Group]]:
        """Kill the replica; return the next one, which has the group."""
        running.cancel()
        manager = self.start()
        running = self.lease(manager)
        await asyncio.sleep(0)
        return manager, running


async def open_both(replicas: Replicas) -> tuple[SessionManager, asyncio.Task[Group], list[Session]]:
    manager = replicas.start()
    running = replicas.lease(manager)
    await asyncio.sleep(0)
    return manager, running, [await manager.open(1.0), await manager.open(1.0)]


async def say(model: Model, session: Session, *messages: Mapping[str, Any]) -> str:
    """Return an answer that its client has seen."""
    call = model.ask(session, *messages)
    text = model.finish(call)
    call.answered([answer(text)])
    await call.keep()
    return text


def told(trajectories: list[Trajectory]) -> list[Any]:
    fields = ("response_ids", "loss_mask", "logprobs")
    return [
        [*(getattr(one, name).tolist() for name in fields), one.spans, one.num_turns] for one in trajectories
    ]


def test_a_session_goes_on_under_its_key_from_the_answers_that_its_client_has_seen():
    async def run() -> Group:
        replicas, model = Replicas(), Model()
        _, running, (one, other) = await open_both(replicas)
        first = await say(model, one, HELLO)
        await say(model, one, OTHER)
        await say(model, other, HELLO)
        other.close(0.5, {"a": 1.0}, "")
        await other.keep_reward()
        before = told(one.trajectories(1))
        manager, running = await replicas.restart(running)
        again = manager.find(one.key)
        assert again is not one and told(again.trajectories(1)) == before
        call = model.ask(again, HELLO, answer(first), MORE)
        assert (call.step, call.branch.number) == (Step.NEXT, 0)
        model.finish(call)
        again.close(1.0, {"a": 0.0})
        return await running

    group = asyncio.run(run())
    assert (group.attempt, group.forked, group.rewards) == (2, (0, 0, 1), [1.0, 1.0, 0.5])
    assert [one.response_ids[one.loss_mask > 0].tolist() for one in group.trajectories] == [
        [101, 104],
        [102],
        [103],
    ]
    assert group.trajectories[2].reward_parts == {"a": 1.0}


def test_an_answer_that_no_client_has_seen_is_sampled_again():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        _, running, (one, _) = await open_both(replicas)
        first = await say(model, one, HELLO)
        unseen = model.ask(one, HELLO, answer(first), MORE)
        seed = unseen.seed(0)
        model.finish(unseen)
        manager, _ = await replicas.restart(running)
        call = model.ask(manager.find(one.key), HELLO, answer(first), MORE)
        assert (call.step, call.seed(0)) == (Step.NEXT, seed)
        (kept,) = manager.find(one.key).trajectories(1)
        assert kept.response_ids[kept.loss_mask > 0].tolist() == [101]

    asyncio.run(run())


def test_a_group_whose_rewards_were_all_given_is_whole_at_once():
    async def run() -> Group:
        replicas, model = Replicas(), Model()
        _, running, sessions = await open_both(replicas)
        for session in sessions:
            await say(model, session, HELLO)
        for session in sessions:
            session.close(1.0, {})
            await session.keep_reward()
        _, running = await replicas.restart(running)
        return await running

    assert asyncio.run(run()).rewards == [1.0, 1.0]


def test_recorded_experts_come_back_too():
    async def run() -> None:
        replicas = Replicas()
        _, running, (one, _) = await open_both(replicas)
        call = one.begin()
        call.ask(Model().ask(Session("x", None, 0, 1), HELLO).asked)  # type: ignore[arg-type]
        spans = (Span(1, 0, 2),)
        call.record(Turn((1, 2), (3, 4), (-0.5, -0.25), spans, "stop", "said", experts=rows_of(0, 0, 4)))
        call.answered([answer("said")])
        await call.keep()
        (before,) = one.trajectories(1)
        manager, _ = await replicas.restart(running)
        (after,) = manager.find(one.key).trajectories(1)
        assert before.experts is not None and after.experts is not None
        assert np.sort(before.experts, -1).tolist() == np.sort(after.experts, -1).tolist()

    asyncio.run(run())


@pytest.mark.parametrize("missing", [0, 1])
def test_a_session_with_a_gap_in_its_records_is_not_made_again(missing: int):
    """As where the buffer had no room any more: its agent begins anew, and no other's."""

    async def run() -> None:
        replicas, model = Replicas(), Model()
        _, running, (one, other) = await open_both(replicas)
        first = await say(model, one, HELLO)
        second = await say(model, one, HELLO, answer(first), MORE)
        await say(model, one, HELLO, answer(first), MORE, answer(second), OTHER)
        await say(model, other, HELLO)
        del replicas.records[missing]
        manager, _ = await replicas.restart(running)
        assert len(list(manager.find(other.key).branches)) == 1
        with pytest.raises(Refusal):
            manager.find(one.key)

    asyncio.run(run())


def test_records_that_cannot_be_read_make_no_session():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        _, running, (one, _) = await open_both(replicas)
        await say(model, one, HELLO)
        replicas.records[0] = replicas.records[0][:-3]
        manager, _ = await replicas.restart(running)
        with pytest.raises(Refusal):
            manager.find(one.key)
        assert (await manager.open(1.0)).sample == 0

    asyncio.run(run())


def test_an_answer_that_another_one_has_replaced_is_not_recorded_late():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        _, running, (one, _) = await open_both(replicas)
        slow = model.ask(one, HELLO)
        model.finish(slow)
        again = model.ask(one, HELLO)
        assert again.step is Step.AGAIN
        model.finish(again)
        await again.keep()
        await slow.keep()
        before = told(one.trajectories(1))
        manager, _ = await replicas.restart(running)
        assert told(manager.find(one.key).trajectories(1)) == before

    asyncio.run(run())


def test_a_stream_s_answer_is_recorded_as_its_parser_reads_it_at_the_end():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        _, running, (one, _) = await open_both(replicas)
        call = model.ask(one, HELLO)

        async def chunks() -> AsyncIterator[str]:
            model.finish(call)
            yield "a thought"
            assert not replicas.records
            call.answered([answer("the rest")])
            yield "the rest"

        assert [chunk async for chunk in _kept(chunks(), call)] == ["a thought", "the rest"]
        manager, _ = await replicas.restart(running)
        again = model.ask(manager.find(one.key), HELLO, answer("the rest"), MORE)
        assert again.step is Step.NEXT

    asyncio.run(run())


def test_a_sample_that_was_taken_back_is_the_session_of_its_new_key():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        manager, running, (one, _) = await open_both(replicas)
        await say(model, one, HELLO)
        manager.take_back(one)
        new = await manager.open(1.0)
        assert new.sample == one.sample
        await say(model, new, OTHER)
        manager, _ = await replicas.restart(running)
        assert len(list(manager.find(new.key).branches)) == 1
        with pytest.raises(Refusal) as refused:
            manager.find(one.key)
        assert refused.value.status == 503

    asyncio.run(run())


def test_a_lost_lease_ends_the_group_before_the_client_sees_the_answer():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        _, running, (one, _) = await open_both(replicas)
        replicas.verdict = "late"
        with pytest.raises(Refusal, match="has lost its lease") as refused:
            await say(model, one, HELLO)
        assert refused.value.status == 410
        with pytest.raises(LeaseLost):
            await running

    asyncio.run(run())


def test_a_client_that_hangs_up_leaves_no_record_in_doubt():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        _, _, (one, other) = await open_both(replicas)
        may_end = asyncio.Event()
        send = replicas.send

        async def slow(*record: Any) -> str:
            await may_end.wait()
            return await send(*record)

        one.group._journal._send = slow  # type: ignore[attr-defined]
        call = model.ask(one, HELLO)
        model.finish(call)
        call.answered([answer("x")])
        keeping = asyncio.create_task(call.keep())
        await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await say(model, other, HELLO)
        assert len(replicas.records) == 2

    asyncio.run(run())


def test_an_unknown_key_waits_for_its_session_and_asks_for_its_group():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        _, running, (one, _) = await open_both(replicas)
        await say(model, one, HELLO)
        running.cancel()
        manager, asked = replicas.start(), asyncio.Event()
        manager.on_demand = asked.set
        waiting = asyncio.create_task(manager.await_return(one.key))
        await asyncio.wait_for(asked.wait(), 5.0)
        assert manager.num_groups_wanted == 1
        replicas.lease(manager)
        await asyncio.wait_for(waiting, 5.0)
        assert manager.find(one.key) and manager.num_groups_wanted == 0
        assert manager.counters["sessions_restored"] == 1

    asyncio.run(run())


def test_a_call_that_is_given_up_while_it_waits_asks_for_no_group_any_more():
    async def run() -> None:
        manager = Replicas().start()
        waiting = asyncio.create_task(manager.await_return("unknown"))
        await asyncio.sleep(0)
        assert manager.num_groups_wanted == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert manager.num_groups_wanted == 0

    asyncio.run(run())


@pytest.mark.parametrize(("return_s", "status"), [(0.0, 401), (0.05, 401), (30.0, 503)])
def test_a_key_that_nobody_knows_is_refused_once_no_session_can_come_back(
    return_s: float, status: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollout_service.gateway.sessions.RETURN_WAIT_S", 0.1)

    async def run() -> None:
        manager, asked = Replicas(return_s).start(), []
        manager.on_demand = lambda: asked.append(True)
        await manager.await_return("unknown")
        assert bool(asked) is (return_s > 0), "a lease is asked for while somebody may come back"
        with pytest.raises(Refusal) as refused:
            manager.find("unknown")
        assert refused.value.status == status
        assert manager.num_groups_wanted == 0

    asyncio.run(run())


def test_a_draining_replica_says_that_its_sessions_go_on_later():
    async def run() -> None:
        replicas, model = Replicas(), Model()
        manager, running, (one, _) = await open_both(replicas)
        await say(model, one, HELLO)
        manager.refuse_sessions()
        running.cancel()
        await asyncio.wait([running])
        with pytest.raises(Refusal, match="at the same address once it is back") as refused:
            manager.find(one.key)
        assert refused.value.status == 503

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=14,
    )
)
def test_whatever_is_said_a_session_made_again_is_what_it_was(script: list[tuple[int, int, int, bool]]):
    """With branches, questions asked again, and kills between any two calls."""

    async def run() -> None:
        replicas, model, said = Replicas(), Model(), []
        manager, running, (one, _) = await open_both(replicas)
        for choice, cut, tail, is_killed in script:
            session = manager.find(one.key)
            history = choose_history(said, choice, cut, tail)
            try:
                text = await say(model, session, *history)
            except Refusal:
                return  # a branch too many: the group has ended
            said.append([*history, answer(text)])
            if is_killed:
                before = told(session.trajectories(1))
                manager, running = await replicas.restart(running)
                assert told(manager.find(one.key).trajectories(1)) == before
                tops = [(b.number, len(b.told), b.transcript.num_shared) for b in session.branches]
                now = manager.find(one.key).branches
                assert [(b.number, len(b.told), b.transcript.num_shared) for b in now] == tops

    asyncio.run(run())


# Over the real engine


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    served = Served(records_sessions=True, gateway={"max_branches": 8})
    with open_gateway_stage(tmp_path_factory.mktemp("stage"), served=served) as opened:
        yield opened


def call_every_api(agent: Agent) -> Iterator[str]:
    """Make calls of all APIs; yield the name of each once its client knows that it has all of the answer."""
    agent.chat(HELLO)
    yield "chat"
    for chunk in agent.chat(OTHER, stream=True):
        if chunk.choices and chunk.choices[0].finish_reason:
            yield "streamed chat"
    agent.complete("Once")
    yield "completion"
    for chunk in agent.complete("Twice", stream=True):
        if chunk.choices and chunk.choices[0].finish_reason:
            yield "streamed completion"
    agent.client.responses.create(model="any", input="Thrice", max_output_tokens=24)
    yield "response"
    for event in agent.client.responses.create(model="any", input="More", max_output_tokens=24, stream=True):
        if event.type == "response.completed":
            yield "streamed response"
    client = anthropic_at(agent.session["anthropic_base_url"], agent.key)
    asked = {"model": "any", "max_tokens": 24}
    client.post("/v1/messages", json={**asked, "messages": [MORE]}).raise_for_status()
    yield "message"
    said = {**asked, "messages": [{"role": "user", "content": "Less"}], "stream": True}
    with client.stream("POST", "/v1/messages", json=said) as stream:
        for line in stream.iter_lines():
            if '"stop_reason":"' in line.replace(" ", ""):
                yield "streamed message"


def anthropic_at(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=60.0)


def test_every_api_s_answer_is_recorded_before_its_client_has_the_end(stage: Stage):
    agent = stage.open()
    session = stage.gateway.manager.find(agent.key)
    records: list[bytes] = []
    journal = session.group._journal  # type: ignore[attr-defined]
    send = journal._send

    async def note(number: int, versions: tuple[int, int], record: bytes) -> str:
        result: str = await send(number, versions, record)
        records.append(record)
        return result

    journal._send = note
    names = []
    for name in call_every_api(agent):
        names.append(name)
        assert len(records) == len(names), f"the client of a {name} has its end before the buffer"
    assert len(names) == 8
    again = asyncio.run(restored(session, records))
    assert told(again.trajectories(1)) == told(session.trajectories(1))
    for mine, theirs in zip(again.branches, session.branches, strict=True):
        assert [vars(turn) for turn in mine.told] == [vars(turn) for turn in theirs.told]


async def restored(session: Session, records: list[bytes]) -> Session:
    grant = session.group.grant
    past = SessionJournal(*grant.key, None, records)
    group = OpenGroup(grant, session.group.prompt, 2, 1e9, past)
    group.restore(8)
    return group.sessions[0]
