"""Tool calls and reasoning, read by vLLM's parsers, over each API and engine: what was sampled is trained."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from asyncrl.core.experience import Group, Trajectory
from tests.rollout.gateway.gateway_parts import ON_SGLANG, Agent, Stage
from tests.rollout.gateway.test_gateway import check_logprobs, rewarded
from tests.rollout.gateway.tool_model import (
    BROKEN,
    CHECK,
    TRAINED,
    TRANSCRIPTS,
    Transcript,
    build_tool_tokenizer,
    observed,
)
from tests.rollout.gateway.tool_parts import CHAT_TOOLS, PLAYERS, Tool, open_tool_stage, play_chat

pytestmark = pytest.mark.long

IN_REPOSITORY, *TALKS = TRANSCRIPTS
WITH_A_CALL, WITH_TWO_CALLS, *_ = TALKS
PICTURE = "data:image/png;base64,iVBORw0KGgo="


# Of one family after the other, as its model is trained once.
ON_ENGINES = [
    pytest.param((engine, family), id=f"{engine}-{family}", marks=marks)
    for family in TRAINED
    for engine, marks in (("vllm", ()), ("sglang", ON_SGLANG.marks))
]


@pytest.fixture(scope="module", params=ON_ENGINES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "VLLM_ENABLE_RESPONSES_API_STORE", "1"
        )  # as somebody may have it who serves with vLLM too
        engine, family = request.param
        with open_tool_stage(tmp_path_factory.mktemp("tools"), family, engine) as stage:
            yield stage


def family_of(served: Stage) -> str:
    return str(served.served.gateway["tool_call_parser"])


def check_transcript(served: Stage, group: Group, trajectory: Trajectory, transcript: Transcript) -> None:
    """The trajectory is the transcript, with the model's part under the mask."""
    tokenizer = build_tool_tokenizer()
    ids = [int(token) for token in [*group.prompt_ids, *trajectory.response_ids]]
    mask = [0] * len(group.prompt_ids) + trajectory.loss_mask.tolist()
    wanted_ids: list[int] = []
    wanted_mask: list[int] = []
    for text, is_answer in transcript.parts(family_of(served)):
        new = tokenizer(text)["input_ids"]
        wanted_ids += new
        wanted_mask += [int(is_answer)] * len(new)
    assert tokenizer.decode(ids[-len(wanted_ids) :]) == tokenizer.decode(wanted_ids)
    assert ids[-len(wanted_ids) :] == wanted_ids
    assert mask[-len(wanted_ids) :] == wanted_mask
    assert not any(mask[: -len(wanted_ids)])
    check_logprobs(served, group, trajectory)


@pytest.mark.parametrize("transcript", TALKS, ids=lambda talk: talk.question)
@pytest.mark.parametrize("api", PLAYERS)
def test_a_conversation_with_tools_is_recorded_as_it_was_sampled(
    served: Stage, api: str, transcript: Transcript
):
    agents = [served.open(), served.open()]
    for agent, is_streamed in zip(agents, (False, True), strict=True):
        said = PLAYERS[api](agent, transcript, is_streamed)
        assert [text.strip() for text in said] == [answer.text for answer in transcript.answers]
    group = rewarded(served, *agents)
    for trajectory in group.trajectories:
        assert trajectory.num_turns == len(transcript.answers)
        check_transcript(served, group, trajectory, transcript)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", PLAYERS)
def test_an_agent_repairs_a_repository_by_four_calls_that_are_executed(
    served: Stage, api: str, is_streamed: bool, tmp_path: Path
):
    agents = [served.open(), served.open()]
    for agent in agents:
        repository = tmp_path / agent.key
        executed: list[str] = []

        def execute(
            command: str, recorded: str, folder: Path = repository, executed: list[str] = executed
        ) -> str:
            shell = ["sh", "-c", command]
            done = subprocess.run(shell, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
            executed.append(command)
            assert observed(done.stdout) == recorded
            return recorded

        repository.mkdir()
        (repository / "add.py").write_text(BROKEN)
        (repository / "check.py").write_text(CHECK)
        PLAYERS[api](agent, IN_REPOSITORY, is_streamed, Tool("bash", "command", execute))
        assert (repository / "add.py").read_text() == BROKEN.replace("a - b", "a + b")
        assert len(executed) == 4, "the fifth ends the episode"
    group = rewarded(served, *agents)
    for trajectory in group.trajectories:
        assert trajectory.num_turns == 5
        check_transcript(served, group, trajectory, IN_REPOSITORY)


def test_a_conversation_may_change_its_api_between_turns(served: Stage):
    agents = [served.open(), served.open()]
    for agent in agents:
        message = ask(agent, user(WITH_A_CALL.question)).choices[0].message
        call = message.tool_calls[0]
        answer = agent.client.responses.create(
            model="any",
            input=[
                {"role": "user", "content": WITH_A_CALL.question},
                {"role": "assistant", "content": message.content},
                {
                    "type": "function_call",
                    "call_id": call.id,
                    "name": "weather",
                    "arguments": call.function.arguments,
                },
                {"type": "function_call_output", "call_id": call.id, "output": "sunny"},
            ],
            tools=[{"type": "function", "strict": None, **CHAT_TOOLS[0]["function"]}],
        )
        assert answer.output_text == "It is sunny in Paris."
    rewarded(served, *agents)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(agent: Agent, *messages: Any, **more: Any) -> Any:
    return agent.client.chat.completions.create(
        model="any", messages=list(messages), tools=CHAT_TOOLS, **more
    )


def test_an_answer_is_recognised_with_its_reasoning_and_without_it(served: Stage):
    agents = [served.open(), served.open()]
    for agent, keeps in zip(agents, (True, False), strict=True):
        first = ask(agent, user(WITH_TWO_CALLS.question)).choices[0].message
        told = first.model_dump(exclude_none=True)
        assert told["reasoning"] == "Two cities."
        if not keeps:
            del told["reasoning"]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(first.tool_calls, WITH_TWO_CALLS.results[0], strict=True)
        ]
        assert ask(agent, user(WITH_TWO_CALLS.question), told, *results).choices[0].message.content
    group = rewarded(served, *agents)
    for trajectory in group.trajectories:
        check_transcript(served, group, trajectory, WITH_TWO_CALLS)


def count_branches(agent: Agent) -> int:
    """Return how many conversations the agent's session has recorded."""
    return len(list(agent.stage.gateway.manager.find(agent.key).branches))


CHANGES: dict[str, Any] = {
    "another id": lambda message: message["tool_calls"][0].update(id="call-1"),
    "another argument": lambda message: message["tool_calls"][0]["function"].update(
        arguments='{"city": "Rome"}'
    ),
    "another name": lambda message: message["tool_calls"][0]["function"].update(name="climate"),
    "no call": lambda message: message.pop("tool_calls"),
    "another thought": lambda message: message.update(reasoning="I never thought that."),
    "another text": lambda message: message.update(content="Let me see."),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_comes_back_changed_begins_another_branch(served: Stage, change: str):
    agent = served.open()
    message = ask(agent, user(WITH_A_CALL.question)).choices[0].message
    told, spaced = message.model_dump(exclude_none=True), message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    spaced["tool_calls"][0]["function"]["arguments"] = '{ "city" :  "Paris" }'
    assert ask(agent, user(WITH_A_CALL.question), spaced, result).choices, "only its spaces differ"
    CHANGES[change](told)
    assert count_branches(agent) == 1
    ask(agent, user(WITH_A_CALL.question), told, result, max_tokens=5)
    assert count_branches(agent) == 2, "the recorded ids do not stand for it"
    agent.stage.post("/reward", {"error": "enough seen"}, agent.key)


def test_another_effort_of_reasoning_is_another_conversation(served: Stage):
    agent = served.open()
    said = ask(agent, user("Say hello.")).choices[0].message
    ask(agent, user("Say hello."), said, user("Again."), reasoning_effort="low", max_tokens=5)
    assert count_branches(agent) == 2
    agent.stage.post("/reward", {"error": "enough seen"}, agent.key)


def test_a_tool_choice_is_the_models(served: Stage):
    agents = [served.open(), served.open()]
    reply = agents[0].client.chat.completions.with_raw_response.create(
        model="any", messages=[user("Say hello.")], tools=CHAT_TOOLS, tool_choice="required"
    )
    assert reply.headers["x-asyncrl-overridden"] == "tool_choice"
    assert reply.parse().choices[0].message.content == "Hello."
    raw = ask(agents[1], user(WITH_A_CALL.question), tool_choice="none").choices[0].message
    assert not raw.tool_calls, "nothing is parsed where none may be called"
    rewarded(served, *agents)


def test_images_are_refused_in_each_api(served: Stage):
    agent = served.open()
    text = {"type": "text", "text": "What is this?"}
    with pytest.raises(openai.BadRequestError, match="'image_url': images, audio and files are not served"):
        ask(agent, {"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": PICTURE}}]})
    part: Any = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
    with pytest.raises(openai.BadRequestError, match="'input_image': images"):
        agent.client.responses.create(model="any", input=[{"role": "user", "content": [part]}])
    client = anthropic.Anthropic(base_url=agent.session["anthropic_base_url"], api_key="unknown")
    source: Any = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    with pytest.raises(anthropic.BadRequestError, match="'image_url': images"):
        client.messages.create(
            model="any",
            max_tokens=9,
            messages=[{"role": "user", "content": [{"type": "image", "source": source}]}],
        )
    assert play_chat(agent, WITH_A_CALL, False)[1] == "It is sunny in Paris.", "nothing was recorded"
    agent.stage.post("/reward", {"error": "enough seen"}, agent.key)


def test_a_response_is_not_stored_and_says_so(served: Stage):
    agent = served.open()
    first = agent.client.responses.create(model="any", input="Say hello.", store=True)
    with pytest.raises(openai.NotFoundError, match=f"'{first.id}' not found"):
        agent.client.responses.create(model="any", input="Again.", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        agent.client.responses.create(model="any", input="Again.", background=True)
    agent.stage.post("/reward", {"error": "enough seen"}, agent.key)
