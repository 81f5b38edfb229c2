"""Conversations of one session: which call goes on from which answer, and what of them is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.experience import Group, decode_group, encode_group, outline_group
from asyncrl.core.staleness import Span
from rollout_service.data.prompts import PromptSet
from rollout_service.gateway.conversation.history import Step, asked_in_chat
from rollout_service.gateway.conversation.session import MAX_CALLS, Call, Session
from rollout_service.gateway.conversation.transcript import Turn
from rollout_service.gateway.refusal import EpisodeFailed, Refusal
from rollout_service.gateway.sessions import OpenGroup, SessionManager
from tests.rollout.gateway.test_gateway_requests import answer
from tests.rollout.gateway.test_gateway_rules import GRANT, HELLO, MORE, RULES, make_desk

FORKING = replace(RULES, max_branches=3)
OTHER = {"role": "user", "content": "in short: hello"}
Messages = Sequence[Mapping[str, Any]]


class Model:
    """Answers calls: the ids of a prompt are those of its messages, and each answer has an id of its own."""

    def __init__(self) -> None:
        self.number = 100

    def ask(self, session: Session, *messages: Mapping[str, Any]) -> Call:
        call = session.begin()
        call.ask(asked_in_chat(messages, {}))
        return call

    def finish(self, call: Call) -> str:
        """End the call with an answer; return its text."""
        self.number += 1
        transcript, asked = call.branch.transcript, call.asked
        assert asked is not None
        if call.step is Step.AGAIN:
            prompt = transcript.last_prompt
        elif call.step is Step.NEXT:
            prompt = (*transcript.ids, len(asked.messages))
        else:
            prompt = (1, *(2 + crc32(message.said.encode()) % 50 for message in asked.messages))
        text = f"answer {self.number}"
        call.record(Turn(prompt, (self.number,), (-0.5,), (Span(1, 0, 1),), "stop", text))
        call.end()
        return text

    def say(self, session: Session, *messages: Mapping[str, Any]) -> str:
        return self.finish(self.ask(session, *messages))


def make_session(max_branches: int = 3) -> Session:
    group: Any = SimpleNamespace(grant=GRANT, has_failed=False, part_names=set(), fail=lambda error: None)
    return Session("key", group, 0, max_branches)


def trained(session: Session) -> list[list[int]]:
    """Return the trained ids of each branch."""
    return [
        trajectory.response_ids[trajectory.loss_mask > 0].tolist() for trajectory in session.trajectories(1)
    ]


def test_a_changed_history_begins_a_branch_that_trains_its_own_answers_alone():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    second = model.say(session, HELLO, answer(first), MORE)
    compacted = model.say(session, OTHER)
    model.say(session, OTHER, answer(compacted), MORE)
    model.say(session, HELLO, answer(first), MORE, answer(second), MORE)
    assert trained(session) == [[101, 102, 105], [103, 104]]


def test_a_branch_off_an_earlier_answer_has_the_recorded_ids_before_it_and_does_not_train_them_again():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    model.say(session, HELLO, answer(first), MORE)
    model.say(session, HELLO, answer(first), OTHER)
    assert trained(session) == [[101, 102], [103]]
    kept, branch = session.trajectories(1)
    place = branch.response_ids.tolist().index(101)
    assert branch.response_ids[: place + 1].tolist() == kept.response_ids[: place + 1].tolist()
    assert (branch.loss_mask[place], kept.loss_mask[place]) == (0, 1)
    assert (branch.num_turns, kept.num_turns) == (1, 2)


def test_an_answer_that_the_client_has_changed_is_not_taken_for_the_recorded_one():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    model.say(session, HELLO, answer(f"{first}, more or less"), MORE)
    assert trained(session) == [[101], [102]]
    assert 101 not in session.trajectories(1)[1].response_ids


def test_a_call_asked_again_replaces_its_answer_and_keeps_its_seed():
    model, session = Model(), make_session()
    call = model.ask(session, HELLO)
    seed = call.seed(0)
    model.finish(call)
    again = model.ask(session, HELLO)
    assert (again.step, again.seed(0)) == (Step.AGAIN, seed)
    model.finish(again)
    assert trained(session) == [[102]]


def test_a_call_asked_again_after_something_went_on_from_it_begins_a_branch():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    model.say(session, HELLO, answer(first), MORE)
    model.say(session, HELLO)
    assert trained(session) == [[101, 102], [103]]
    model.say(session, HELLO, answer(first), OTHER)  # from the first branch's first answer: it is taken
    again = model.ask(session, HELLO, answer(first), MORE)
    assert again.step is Step.AGAIN and again.branch.number == 0
    again.end()


def test_an_answer_that_a_branch_has_taken_is_never_replaced():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    waiting = model.ask(session, HELLO, answer(first), MORE)  # the branch is busy
    model.say(session, HELLO, answer(first), OTHER)
    waiting.end()
    call = model.ask(session, HELLO)
    assert call.step is Step.FIRST, "with another seed than the answer's"
    model.finish(call)
    assert trained(session) == [[101], [102], [103]]


def test_calls_side_by_side_are_conversations_of_their_own():
    model, session = Model(), make_session()
    calls = [model.ask(session, HELLO), model.ask(session, HELLO), model.ask(session, OTHER)]
    assert len({call.seed(0) for call in calls}) == 3, "equal prompts get different answers"
    texts = [model.finish(call) for call in reversed(calls)][::-1]
    for text, asked in zip(texts, (HELLO, HELLO, OTHER), strict=True):
        model.say(session, asked, answer(text), MORE)
    assert sorted(trained(session)) == [[101, 106], [102, 105], [103, 104]]


def test_two_calls_that_go_on_from_one_answer_at_once_share_it():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    calls = [model.ask(session, HELLO, answer(first), more) for more in (MORE, OTHER)]
    for call in calls:
        model.finish(call)
    assert trained(session) == [[101, 102], [103]]


def test_a_call_whose_client_leaves_leaves_no_branch():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    for _ in range(5):
        model.ask(session, OTHER).end()
        waiting = model.ask(session, HELLO, answer(first), MORE)
        model.ask(session, HELLO, answer(first), OTHER).end()
        waiting.end()
    assert trained(session) == [[101]]


def test_a_client_may_go_on_before_its_last_call_has_ended_on_this_side():
    model, session = Model(), make_session()
    call = model.ask(session, HELLO)
    call.record(Turn((1, 2), (7,), (-0.5,), (Span(1, 0, 1),), "stop", "read"))
    following = model.ask(session, HELLO, answer("read"), MORE)
    assert (following.step, following.branch) == (Step.NEXT, call.branch)
    call.end()
    assert following.branch.is_busy, "its own call is in flight"


def test_a_busy_branch_is_not_asked_again():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    waiting = model.ask(session, HELLO, answer(first), MORE)
    again = model.ask(session, HELLO)
    assert (again.step, again.branch.number) == (Step.FIRST, 1)
    model.finish(waiting)
    model.finish(again)
    assert trained(session) == [[101, 102], [103]]


def test_an_answer_that_comes_after_its_client_left_is_not_recorded():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    call = model.ask(session, HELLO, answer(first), MORE)
    call.end()
    model.finish(call)
    assert trained(session) == [[101]]


def test_one_branch_too_many_is_refused_and_ends_the_group():
    async def run() -> None:
        manager = SessionManager(PromptSet((), "digest"), FORKING, 20.0, lambda _: asyncio.sleep(0))
        group = OpenGroup(GRANT, None, 1, 60.0)  # type: ignore[arg-type]
        session, model = group.open(manager.rules.max_branches), Model()
        for messages in ([HELLO], [OTHER], [MORE]):
            model.say(session, *messages)
        with pytest.raises(Refusal, match=r"and it has 3 branches.*max_branches") as refused:
            model.ask(session, MORE, MORE)
        assert (refused.value.status, refused.value.code) == (400, "history_changed")
        with pytest.raises(EpisodeFailed, match=r"history_changed: session 5\.1\.0"):
            await group.outcome

    asyncio.run(run())


def test_calls_side_by_side_are_bounded_and_one_at_a_time_where_there_are_no_branches():
    model = Model()
    for max_branches, limit in ((3, MAX_CALLS), (1, 1)):
        session = make_session(max_branches)
        for _ in range(limit):
            session.begin()
        with pytest.raises(Refusal, match=f"{limit} at most") as refused:
            session.begin()
        assert refused.value.status == 409
    session = make_session(1)
    model.say(session, HELLO)
    with pytest.raises(Refusal, match="not one that this session recorded"):
        model.ask(session, OTHER)


def test_a_group_of_sessions_with_branches_passes_the_buffers_checks():
    async def run() -> Group:
        desk, _ = make_desk()
        desk.rules = FORKING
        opening = asyncio.create_task(desk.open(5.0))
        await asyncio.sleep(0)
        running, model = asyncio.create_task(desk.run(GRANT)), Model()
        first, second = await opening, await desk.open(0.0)
        model.say(first, HELLO)
        model.say(first, OTHER)
        model.say(second, HELLO)
        first.close(1.0, {"a": 1.0})
        second.close(0.0, {"a": 0.0})
        return await running

    group = asyncio.run(run())
    assert group.forked == (0, 0, 1)
    assert group.rewards == [1.0, 1.0, 0.0]
    frames = encode_group(group)
    assert decode_group(frames).forked == (0, 0, 1) and outline_group(frames).num_samples == 2


def choose_history(said: list[list[Mapping[str, Any]]], choice: int, cut: int, tail: int) -> Messages:
    """Return a conversation that holds a part of one that was said, and a message more."""
    before = said[choice % len(said)] if said else []
    kept = before[: cut % (len(before) + 1)]
    if kept and kept[-1]["role"] == "user":
        kept = kept[:-1]
    return [*kept, {"role": "user", "content": f"question {tail}"}]


def test_an_answer_that_a_branch_takes_while_it_is_asked_for_again_is_trained_beside_the_new_one():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    old = model.say(session, HELLO, answer(first), MORE)
    again = model.ask(session, HELLO, answer(first), MORE)
    assert again.step is Step.AGAIN
    model.say(session, HELLO, answer(first), MORE, answer(old), OTHER)
    new = model.finish(again)
    assert not any(branch.is_busy for branch in session.branches)
    model.say(session, HELLO, answer(first), MORE, answer(new), MORE)
    assert trained(session) == [[101, 102], [103], [104, 105]]
    assert [one.num_turns for one in session.trajectories(1)] == [2, 1, 2]


def test_one_branch_too_many_for_an_answer_that_was_asked_for_again_ends_the_group():
    failed: list[Exception] = []
    model, session = Model(), make_session(2)
    session.group.fail = failed.append  # type: ignore[method-assign, assignment]
    first = model.say(session, HELLO)
    again = model.ask(session, HELLO)
    model.say(session, HELLO, answer(first), OTHER)
    with pytest.raises(Refusal, match="it has 2 branches"):
        model.finish(again)
    assert "history_changed" in str(failed) and again.refusal is not None
    again.end()
    assert trained(session) == [[101], [102]]


def test_of_branches_that_hold_as_much_the_call_goes_on_from_the_one_that_ends_there():
    model, session = Model(), make_session(2)
    calls = [model.ask(session, HELLO), model.ask(session, HELLO)]
    for call, token in zip(calls, (7, 8), strict=True):
        call.record(Turn((1, 2), (token,), (-0.5,), (Span(1, 0, 1),), "stop", "equal"))
        call.end()
    model.say(session, HELLO, answer("equal"), MORE)
    model.say(session, HELLO, answer("equal"), OTHER)
    assert trained(session) == [[7, 101], [8, 102]]


def test_an_answer_is_asked_for_again_once_the_branch_that_had_taken_it_is_gone():
    model, session = Model(), make_session()
    first = model.say(session, HELLO)
    waiting = model.ask(session, HELLO, answer(first), MORE)
    model.ask(session, HELLO, answer(first), OTHER).end()
    waiting.end()
    assert model.ask(session, HELLO).step is Step.AGAIN


def test_no_two_turns_of_a_session_have_one_seed():
    model, session = Model(), make_session(3)
    seeds = []
    for opening in (HELLO, OTHER, MORE):
        said: list[Mapping[str, Any]] = [opening]
        for _ in range(4):
            call = model.ask(session, *said)
            seeds.append(call.seed(0))
            said += [answer(model.finish(call)), HELLO]
    assert len(set(seeds)) == 12


def test_an_answer_that_is_parsed_late_stays_with_its_own_turn():
    model, session = Model(), make_session()
    slow = model.ask(session, HELLO)
    slow.record(Turn((1, 2), (7,), (-0.5,), (Span(1, 0, 1),), "stop", "read"))
    again = model.ask(session, HELLO)
    again.record(Turn((1, 2), (8,), (-0.5,), (Span(1, 0, 1),), "stop", "new"))
    slow.answered([answer("late")])
    assert model.ask(session, HELLO, answer("new"), MORE).step is Step.NEXT


def test_a_conversation_is_kept_once_however_many_turns_it_has():
    model, session = Model(), make_session(1)
    said: list[Mapping[str, Any]] = [HELLO]
    for _ in range(50):
        said += [answer(model.say(session, *said)), MORE]
    (branch,) = session.branches
    assert sum(len(told.added.messages) + len(told.reply.messages) for told in branch.told) == 100


OPERATIONS = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.booleans())


class Conversations:
    """What clients of one session have said and heard, with calls in flight."""

    def __init__(self) -> None:
        self.model, self.session = Model(), make_session(30)
        self.said: list[list[Mapping[str, Any]]] = []
        self.flying: list[tuple[Call, Messages]] = []
        self.heard: dict[str, list[str]] = {}
        """Each answer that stands, and those in its call's history."""
        self.ids: dict[str, int] = {}

    def ask(self, choice: int, cut: int, tail: int) -> None:
        messages = choose_history(self.said, choice, cut, tail)
        self.flying.append((self.model.ask(self.session, *messages), messages))

    def finish(self, place: int) -> None:
        """A call ends; nobody goes on from the answer that it replaces."""
        call, messages = self.flying.pop(place % len(self.flying))
        replaced = call.branch.told[-1].reply.text if call.step is Step.AGAIN else ""
        branch = call.branch
        text = self.model.finish(call)
        if replaced and all(told.reply.text != replaced for told in branch.told):
            del self.heard[replaced]
            self.said = [one for one in self.said if answer(replaced) not in one]
        self.heard[text] = [str(one["content"]) for one in messages if one["role"] == "assistant"]
        self.ids[text] = self.model.number
        self.said.append([*messages, answer(text)])


@given(st.lists(OPERATIONS, min_size=1, max_size=14))
@settings(max_examples=300, deadline=None)
def test_every_answer_that_stands_is_trained_once_and_follows_its_own_history(steps: list[Any]) -> None:
    run = Conversations()
    for choice, cut, tail, waits in steps:
        if len(run.flying) < MAX_CALLS:
            run.ask(choice, cut, tail)
        if not waits:
            run.finish(choice)
    while run.flying:
        run.finish(0)
    found = [token for branch in trained(run.session) for token in branch]
    assert sorted(found) == sorted(run.ids[text] for text in run.heard), "each that stands, once"
    for branch, trajectory in zip(run.session.branches, run.session.trajectories(1), strict=True):
        sampled = [token for token in trajectory.response_ids.tolist() if token > 100]
        last = branch.told[-1].reply.text
        assert sampled == [*(run.ids[text] for text in run.heard[last]), run.ids[last]]
