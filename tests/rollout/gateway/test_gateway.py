"""The gateway under OpenAI's own client, with the real engines: what a client saw is what is trained."""

from __future__ import annotations

import runpy
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.service_command import Drain
from asyncrl.core.staleness import Span
from asyncrl.core.status.statuses import pack_status
from rollout_service.gateway.app import MAX_BODY_BYTES
from rollout_service.gateway.keys import GatewayKey
from rollout_service.tasks.tiny_text import build_tokenizer
from tests.docs.pages import YOUR_OWN, write_files
from tests.rollout.engine.engine_parts import logprobs_of
from tests.rollout.gateway.gateway_parts import (
    ENGINES,
    EOS,
    QUESTION,
    Agent,
    Served,
    Stage,
    open_gateway_stage,
)
from tests.waiting import wait_for

TOLERANCE = 1e-4
USER = {"role": "user", "content": QUESTION}
MORE = {"role": "user", "content": "Und sonst?"}
OTHER = {"role": "user", "content": "Was noch?"}


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    engine = Served(engine=request.param)
    with open_gateway_stage(tmp_path_factory.mktemp("gateway"), served=engine) as stage:
        yield stage


def seen_tokens(choice: Any) -> tuple[list[int], list[float]]:
    """Return the ids and log-probs that a chat's answer shows."""
    return choice.token_ids, [token.logprob for token in choice.logprobs.content]


def streamed_ids(choice: Any) -> list[int]:
    """Return the ids of a chunk, which has none at the beginning and the end."""
    return getattr(choice, "token_ids", None) or []


def rewarded(served: Stage, *agents: Agent) -> Group:
    """Close the agents' sessions and return their group."""
    for reward, agent in enumerate(agents):
        assert agent.reward(float(reward), parts={"right": reward}).status_code == 200
    group = served.take_group()
    assert group.rewards == [float(reward) for reward in range(len(agents))]
    return group


def check_logprobs(served: Stage, group: Group, trajectory: Trajectory) -> None:
    """Every sampled token's log-prob is Hugging Face's under the version of its span."""
    for span in trajectory.spans:
        found = torch.tensor(trajectory.logprobs[span.start : span.end])
        sampled = torch.tensor(trajectory.loss_mask[span.start : span.end]).bool()
        wanted = logprobs_of(
            served.models[span.version], group.prompt_ids.tolist(), trajectory.response_ids.tolist()
        )[span.start : span.end]
        assert ((found - wanted).abs() * sampled).max() < TOLERANCE


def test_what_two_siblings_saw_in_their_chats_is_their_group(served: Stage):
    time.sleep(0.3)
    assert served.learner.status().issued == 0, "a group was leased that nobody had asked for"
    agents = [served.open(), served.open()]
    assert [agent.session["sample"] for agent in agents] == [0, 1]
    assert agents[0].session["ticket"] == agents[1].session["ticket"]
    assert (agents[0].session["prompt"], agents[0].session["data_source"]) == ([USER], "")
    assert agents[0].client.models.list().data[0].id == "policy"
    choices = [agent.chat(USER).choices[0] for agent in agents]
    group = rewarded(served, *agents)
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert group.prompt_ids.tolist() == build_tokenizer()(text)["input_ids"]
    for choice, trajectory in zip(choices, group.trajectories, strict=True):
        ids, logprobs = seen_tokens(choice)
        assert trajectory.response_ids.tolist() == ids
        assert np.abs(trajectory.logprobs - np.array(logprobs)).max() < 1e-6
        assert trajectory.loss_mask.all()
        assert trajectory.finish_reason == choice.finish_reason
        assert set(trajectory.reward_parts) == {"right"}
        check_logprobs(served, group, trajectory)
    assert choices[0].message.content != choices[1].message.content


def check_stream(served: Stage, kind: str) -> int:
    """Stream an answer, check that the group holds what was streamed, and return the number of chunks."""
    agents = [served.open(), served.open()]
    ask = [agent.chat if kind == "chat" else agent.complete for agent in agents]
    prompt: Any = USER if kind == "chat" else QUESTION
    chunks = [chunk.choices[0] for chunk in ask[0](prompt, stream=True) if chunk.choices]
    whole = ask[1](prompt).choices[0]
    group = rewarded(served, *agents)
    streamed = [token for chunk in chunks for token in streamed_ids(chunk)]
    assert chunks[-1].finish_reason == group.trajectories[0].finish_reason
    assert [trajectory.response_ids.tolist() for trajectory in group.trajectories] == [
        streamed,
        whole.token_ids,
    ]
    for trajectory in group.trajectories:
        check_logprobs(served, group, trajectory)
    return len(chunks)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_shows_token_by_token_what_is_recorded(served: Stage, kind: str):
    # The tokens that a busy front end finds at once are one chunk, and may be all of an answer.
    assert any(check_stream(served, kind) > 2 for _ in range(5))


def test_the_next_turn_goes_on_from_the_sampled_ids_and_not_from_their_text(served: Stage):
    agents = [served.open(), served.open()]
    seen: list[list[Any]] = []
    for agent, max_tokens in zip(agents, (5, 300), strict=True):  # one is cut, the other ends by itself
        first = agent.chat(USER, max_tokens=max_tokens).choices[0]
        second = agent.chat(USER, first.message, MORE).choices[0]
        third = agent.chat(USER, first.message, MORE, second.message, USER).choices[0]
        seen.append([first, second, third])
    group = rewarded(served, *agents)
    assert [choices[0].finish_reason for choices in seen] == ["length", "stop"]
    texts = [choice.message.content for choices in seen for choice in choices]
    assert any("�" in text for text in texts), "every answer would have survived a tokenizer"
    for choices, trajectory in zip(seen, group.trajectories, strict=True):
        ids, mask = expected_turns([choice.token_ids for choice in choices], [MORE, USER])
        assert trajectory.response_ids.tolist() == ids
        assert trajectory.loss_mask.tolist() == mask
        assert trajectory.num_turns == 3
        assert not trajectory.logprobs[trajectory.loss_mask == 0].any()
        check_logprobs(served, group, trajectory)


def expected_turns(answers: list[list[int]], users: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return the ids and the mask of a conversation: observations end what the model did not end itself."""
    tokenizer = build_tokenizer()
    ids, mask = list(answers[0]), [1] * len(answers[0])
    for user, answer in zip(users, answers[1:], strict=True):
        text = f"\n<|im_start|>user\n{user['content']}<|im_end|>\n<|im_start|>assistant\n"
        between = ([] if ids[-1] == EOS else [EOS]) + tokenizer(text)["input_ids"]
        ids += between + answer
        mask += [0] * len(between) + [1] * len(answer)
    return ids, mask


def test_a_completion_goes_on_from_its_text_or_its_ids(served: Stage):
    agents = [served.open(), served.open()]
    first = agents[0].complete(QUESTION).choices[0]
    second = agents[0].complete(QUESTION + first.text + " and").choices[0]
    ids = agents[1].complete(build_tokenizer()(QUESTION)["input_ids"]).choices[0]
    more = agents[1].complete([*ids.prompt_token_ids, *ids.token_ids, 7, 8]).choices[0]
    group = rewarded(served, *agents)
    new = build_tokenizer()(" and")["input_ids"]
    assert group.trajectories[0].response_ids.tolist() == [*first.token_ids, *new, *second.token_ids]
    assert group.trajectories[1].response_ids.tolist() == [*ids.token_ids, 7, 8, *more.token_ids]


def test_a_stop_string_that_the_model_wrote_is_not_read_twice(served: Stage):
    served.serve(11, ends=False)
    agents = [served.open(), served.open()]
    whole = agents[0].complete(QUESTION).choices[0].text
    stop = next(letter for letter in reversed(whole) if letter.isascii())
    cut = agents[0].complete(QUESTION, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole.partition(stop)[0], "stop")
    more = agents[0].complete(QUESTION + cut.text + stop + " 2").choices[0]
    agents[1].complete(QUESTION)
    group = rewarded(served, *agents)
    new = build_tokenizer()(" 2")["input_ids"]
    assert group.trajectories[0].response_ids.tolist() == [*cut.token_ids, *new, *more.token_ids]
    served.serve(1)


def test_a_call_that_is_asked_again_gets_the_same_answer_and_counts_once(served: Stage):
    agents = [served.open(), served.open()]
    choices = [agent.chat(USER).choices[0] for agent in (agents[0], agents[0], agents[1])]
    assert choices[0].token_ids == choices[1].token_ids != choices[2].token_ids
    group = rewarded(served, *agents)
    assert group.trajectories[0].response_ids.tolist() == choices[0].token_ids
    assert group.trajectories[0].num_turns == 1


def test_a_swap_in_the_middle_of_a_stream_shows_in_its_spans(served: Stage):
    old = served.serve(11, ends=False)
    agents = [served.open(), served.open()]
    stream = agents[0].chat(USER, max_tokens=1300, stream=True)
    first = next(chunk for chunk in stream if chunk.choices and streamed_ids(chunk.choices[0]))
    new = served.offer(12, ends=False)
    rest = [chunk.choices[0] for chunk in stream if chunk.choices]
    ids = [token for choice in (first.choices[0], *rest) for token in streamed_ids(choice)]
    wait_for(lambda: served.replica.status().version == new, "the new version")
    agents[1].chat(USER)
    group = rewarded(served, *agents)
    crossing, after = group.trajectories
    assert crossing.response_ids.tolist() == ids
    border = crossing.spans[0].end
    assert crossing.spans == (Span(old, 0, border), Span(new, border, 1300))
    assert after.spans == (Span(new, 0, 24),)
    check_logprobs(served, group, crossing)
    served.serve(1)


FRAMEWORK = {
    "temperature": 0.3,
    "top_p": 0.9,
    "n": 2,
    "seed": 4,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
REPLACED = "n, seed, temperature, top_p"


def test_sampling_parameters_of_a_framework_are_replaced_counted_and_named(served: Stage):
    agents = [served.open(), served.open()]
    before = Counter(served.gateway.status().overridden)

    def ask(agent: Agent, model: str, **more: Any) -> Any:
        ids = {"return_token_ids": True}
        create = agent.client.chat.completions.with_raw_response.create
        return create(model=model, messages=[USER], max_tokens=24, tools=TOOLS, extra_body=ids, **more)

    whole, streamed = ask(agents[0], "a", **FRAMEWORK), ask(agents[1], "a", stream=True, **FRAMEWORK)
    chunks = [chunk.choices[0] for chunk in streamed.parse() if chunk.choices]
    plain = ask(agents[0], "another")
    names = [reply.headers.get("x-asyncrl-overridden") for reply in (whole, streamed, plain)]
    assert names == [REPLACED, REPLACED, None]
    counted = Counter(served.gateway.status().overridden) - before
    assert counted == dict.fromkeys(REPLACED.split(", "), 2)
    (choice,), (same,) = whole.parse().choices, plain.parse().choices
    assert choice.token_ids == same.token_ids, "the run's own sampling is what both calls get"
    group = rewarded(served, *agents)
    assert "search" in build_tokenizer().decode(group.prompt_ids), "the template was not given the tools"
    ids = [choice.token_ids, [token for chunk in chunks for token in streamed_ids(chunk)]]
    assert [trajectory.response_ids.tolist() for trajectory in group.trajectories] == ids
    for trajectory in group.trajectories:
        check_logprobs(served, group, trajectory)


def test_a_strict_gateway_tells_why_it_refuses(served: Stage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        served.gateway.manager, "rules", replace(served.gateway.manager.rules, is_strict=True)
    )
    agent = served.open()
    with pytest.raises(openai.BadRequestError, match="'temperature' cannot be"):
        agent.chat(USER, temperature=0.3)
    assert agent.chat(USER, temperature=1.0, top_p=1).choices[0].token_ids
    agent.stage.post("/reward", {"error": "enough seen"}, agent.key)


def test_a_prompt_or_an_answer_without_room_is_refused(served: Stage):
    agent = served.open()
    with pytest.raises(openai.BadRequestError, match=r"over data\.max_prompt_tokens"):
        agent.chat({"role": "user", "content": "a" * 300})
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        agent.chat({"role": "user", "content": "a" * 3000})
    agent.stage.post("/reward", {"error": "enough seen"}, agent.key)


def test_changed_histories_and_calls_side_by_side_are_trajectories_of_one_episode(served: Stage):
    agents = [served.open(), served.open()]
    first = agents[0].chat(USER).choices[0]
    said = {"role": "assistant", "content": first.message.content}
    with ThreadPoolExecutor() as pool:
        asked = (
            [USER, {**said, "content": "I said otherwise"}, MORE],
            [USER, said, MORE],
            [USER, said, OTHER],
        )
        running = [pool.submit(agents[0].chat, *messages) for messages in asked]
        choices = [first, *(one.result().choices[0] for one in running)]
    agents[1].chat(USER)
    for reward, agent in enumerate(agents):
        assert agent.reward(float(reward)).status_code == 200
    group = served.take_group()
    assert (group.forked, group.rewards) == ((0, 0, 0, 1), [0.0, 0.0, 0.0, 1.0])
    found = []
    for trajectory in group.trajectories:
        check_logprobs(served, group, trajectory)
        found += trajectory.response_ids[trajectory.loss_mask > 0].tolist()
    assert Counter(found) >= Counter(token for choice in choices for token in seen_tokens(choice)[0])
    assert sum(trajectory.num_turns for trajectory in group.trajectories) == 5, "each answer is trained once"


def test_an_agent_that_changes_its_history_where_no_branch_is_left_ends_its_group(
    served: Stage, monkeypatch: pytest.MonkeyPatch
):
    rules = replace(served.gateway.manager.rules, max_branches=1)
    monkeypatch.setattr(served.gateway.manager, "rules", rules)
    agents = [served.open(), served.open()]
    agents[0].chat(USER)
    agents[1].chat(USER)
    with pytest.raises(openai.BadRequestError, match="not one that this session recorded"):
        agents[0].chat(USER, {"role": "assistant", "content": "I said otherwise"}, MORE)
    wait_for(lambda: "history_changed" in agents[1].reward().text, "the sibling's end")
    wait_for(lambda: served.replica.status().in_flight_groups == 0, "the report of the failure")
    assert served.replica.status().counters["groups_failed"] >= 1


def test_missing_siblings_end_a_group_at_its_deadline_with_an_error_in_the_stream(served: Stage):
    served.serve(11, ends=False)
    served.gateway.manager._deadline_s = 0.5
    try:
        agent = served.open()
        with pytest.raises(openai.APIError, match="siblings_missing: 0 of 2"):
            list(agent.chat(USER, max_tokens=1300, stream=True))
        with pytest.raises(openai.APIStatusError, match="siblings_missing") as refused:
            agent.chat(USER)
        assert refused.value.status_code == 410
    finally:
        served.gateway.manager._deadline_s = 120.0
    wait_for(lambda: served.replica.status().engine.in_flight_requests == 0, "the aborted call")
    served.serve(1)


def test_a_client_that_hangs_up_leaves_its_session_free_for_another_try(served: Stage):
    served.serve(11, ends=False)
    agents = [served.open(), served.open()]
    stream = agents[0].chat(USER, max_tokens=1300, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: served.replica.status().engine.in_flight_requests == 0, "the end of the call")
    for agent in agents:
        agent.chat(USER)
    assert [trajectory.num_tokens for trajectory in rewarded(served, *agents).trajectories] == [24, 24]
    served.serve(1)


# Doors


def test_the_app_has_no_route_but_these(served: Stage):
    routes = {
        (method, route.path)
        for route in served.gateway.build_app().routes
        for method in route.methods
        if method != "HEAD"
    }
    mine = {("POST", "/reward"), ("GET", "/v1/models")}
    calls = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
    mine |= {("POST", f"/v1/{call}") for call in calls}
    in_path = {(method, "/sessions/{key}" + path) for method, path in mine}
    assert routes == {("GET", "/health"), ("POST", "/sessions"), *mine, *in_path}


@pytest.mark.parametrize(
    "path",
    ["/collective_rpc", "/pause", "/resume", "/update_weights", "/init_weight_transfer_engine", "/tokenize",
     "/detokenize", "/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/responses/resp_1", "/docs",
     "/openapi.json", "/metrics", "/v1/chat/completions/batch"],
)  # fmt: skip
def test_vllms_other_routes_are_not_there(served: Stage, path: str):
    assert served.post(path, {}).status_code == 404


def test_a_wrong_key_opens_nothing(served: Stage):
    agent = served.open()
    for key in ("", "wrong", agent.key[:-1], agent.key + "a"):
        assert served.post("/v1/chat/completions", {"messages": [USER]}, key).status_code == 401
        assert served.post("/reward", {"reward": 1.0}, key).status_code == 401
    assert agent.chat(USER).choices
    with_key = openai.OpenAI(base_url=f"{served.url}/v1", api_key=agent.key, max_retries=0)
    assert with_key.models.list().data
    object.__setattr__(served.gateway._key, "secret", "a-long-enough-secret")
    try:
        for key in ("", "a-long-enough-secreT", agent.key):
            assert served.post("/sessions", {}, key).status_code == 401
        assert served.post("/sessions", {}, "a-long-enough-secret").status_code == 200
    finally:
        object.__setattr__(served.gateway._key, "secret", GatewayKey().secret)
    served.post("/reward", {"error": "enough seen"}, agent.key)


def test_bodies_are_bounded_and_must_be_json(served: Stage):
    assert served.post("/sessions", {"fill": "a" * MAX_BODY_BYTES}).status_code == 413
    assert served.post("/sessions", {}, **{"Content-Type": "text/plain"}).status_code == 415
    assert served.post("/sessions", []).status_code == 400
    assert served.post("/sessions", {"wait_s": 1e9}).status_code == 400
    agent = served.open()
    for body in ({}, {"reward": "1"}, {"reward": True}, {"reward": 1.0, "parts": {"a": None}}):
        assert served.post("/reward", body, agent.key).status_code == 400
    assert agent.reward().json()["error"]["type"] == "no_answer"
    served.post("/reward", {"error": "enough seen"}, agent.key)


def test_the_example_of_the_page_makes_a_group(served: Stage):
    page = Path("docs/gateway.md").read_text()
    example: dict[str, Any] = {}
    exec(page.split("```python\n")[1].partition("```")[0], example)
    example["gateway"] = served.url
    for _ in range(2):
        example["run_episode"]()
    assert [trajectory.num_turns for trajectory in served.take_group().trajectories] == [2, 2]


def test_the_agent_of_the_page_makes_a_group(served: Stage, tmp_path: Path):
    write_files(YOUR_OWN / "agent.md", tmp_path)
    run_episode = runpy.run_path(str(tmp_path / "agent.py"))["run_episode"]
    rewards = [run_episode(served.url) for _ in range(2)]
    assert served.take_group().rewards == rewards


def test_a_draining_replica_tells_its_agents(served: Stage):
    """The last one: it ends the replica."""
    agents, alone = [served.open(), served.open()], served.open()
    served.replica.command(Drain(60.0))
    wait_for(lambda: served.replica.status().state == "DRAINING", "a drain")
    assert "draining" in served.post("/sessions", {"wait_s": 0}).text
    with pytest.raises(openai.APIStatusError, match="has ended: draining") as refused:
        alone.chat(USER)
    assert refused.value.status_code == 410
    for agent in agents:
        assert agent.chat(USER).choices, "a group whose siblings are all there goes on"
    rewarded(served, *agents)
    wait_for(lambda: served.replica.status().state == "RETIRED", "the end")
    assert pack_status(served.replica.status())
