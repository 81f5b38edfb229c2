"""The formats of vLLM's tool parsers through the gateway: clients get the calls, sessions keep the tokens.

A script says the answers, token by token; the parsers, their serving and the gateway are the real ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from transformers import PreTrainedTokenizerFast
from vllm.config import VllmConfig
from vllm.parser import ParserManager
from vllm.tool_parsers import ToolParserManager

from asyncrl.core.experience import Group
from rollout_service.gateway.parsers import Parsers
from rollout_service.tasks.tiny_text import build_tokenizer, make_folder
from tests.rollout.gateway.families.formats import (
    BREAKS_STREAMS,
    FORMATS,
    LOSES_BROKEN,
    TAKES_BROKEN,
    Answer,
    Format,
)
from tests.rollout.gateway.families.scripted_vllm import (
    LOGPROB,
    ScriptedAgent,
    make_config,
    open_scripted_stage,
)
from tests.rollout.gateway.tool_model import BOTH, TEMPLATE, WEATHER, Transcript
from tests.rollout.gateway.tool_parts import PLAYERS

SHORT = ("internlm", "kimi_k3", "qwen3_coder")
"""The calls are JSON, elements with special tokens, elements; the other families are long tests."""
FAMILIES = [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in FORMATS]
END = "<|im_end|>"
PROPERTIES = {
    "weather": {"city": "string"},
    "write": {"path": "string", "text": "string", "options": "object", "count": "integer"},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in of.items()}},
        },
    }
    for name, of in PROPERTIES.items()
]
BROKEN = "Pa"
"""End of the broken call: the model stops in the middle of Paris."""


@dataclass(frozen=True)
class Said:
    """An answer as its client got it."""

    text: str
    thought: str
    calls: list[tuple[str, Any]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return make_config(make_folder(tmp_path_factory.mktemp("families") / "model"))


def make_tokenizer(form: Format) -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer with a family's tokens, template and metadata."""
    tokenizer = build_tokenizer()
    if form.tokens:
        tokenizer.add_tokens(list(form.tokens), special_tokens=form.hides_tokens)
    for name, value in form.metadata.items():
        setattr(tokenizer, name, value)
    tokenizer.chat_template = TEMPLATE.replace("assistant\n{% endif", f"assistant\n{form.opens}{{% endif")
    return tokenizer


def make_answers(form: Format) -> list[Answer]:
    """Return a conversation's answers, as a model of the family can give them."""
    answers = (
        replace(WEATHER, thought="One city."),
        BOTH,
        Answer("I write it.", (("write", dict(form.hard)),)),
        Answer("It is sunny."),
    )
    return [form.possible(answer) for answer in answers]


async def converse(form: Format, agent: ScriptedAgent, num_turns: int, is_streamed: bool) -> list[Said]:
    """Have a conversation of so many turns over chat completions, as harnesses do."""
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    said = []
    for _ in range(num_turns):
        more = {"extra_body": {"chat_template_kwargs": dict(form.asks)}} if form.asks else {}
        asked: Any = {"model": "any", "messages": messages, "tools": TOOLS, **more}
        if is_streamed:
            async with agent.client.chat.completions.stream(**asked) as stream:
                message: Any = (await stream.get_final_completion()).choices[0].message
        else:
            message = (await agent.client.chat.completions.create(**asked)).choices[0].message
        told = message.model_dump(exclude_none=True, exclude={"parsed"})
        calls = told.get("tool_calls", [])
        for call in calls:
            call["function"].pop("parsed_arguments", None)
            call["function"].setdefault("arguments", "")  # a stream may have ended before them
        ids = [call["id"] for call in calls]
        assert all(ids) and len(set(ids)) == len(ids)
        pairs = [(call["function"]["name"], read(call["function"]["arguments"])) for call in calls]
        said.append(Said((message.content or "").strip(), told.get("reasoning", "").strip(), pairs))
        results = [{"role": "tool", "tool_call_id": one, "content": "done"} for one in ids]
        messages += [told, *(results or [{"role": "user", "content": "Go on."}])]
    return said


def read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def check_recorded(group: Group, script: Sequence[Sequence[int]]) -> None:
    """Each session is one conversation, whose sampled tokens are the script's, and no others."""
    assert not group.forked, "a history was not recognised"
    for trajectory in group.trajectories:
        is_sampled = trajectory.loss_mask > 0
        assert trajectory.response_ids[is_sampled].tolist() == [token for ids in script for token in ids]
        assert trajectory.num_turns == len(script)
        assert set(trajectory.logprobs[is_sampled].tolist()) == {LOGPROB}


def play(config: VllmConfig, family: str, texts: Sequence[str]) -> list[list[Said]]:
    """Have the conversation unstreamed and streamed, check what is recorded, and return what was said."""
    form = FORMATS[family]
    tokenizer = make_tokenizer(form)
    script = [tokenizer(text + END)["input_ids"] for text in texts]
    assert [tokenizer.decode(ids) for ids in script] == [text + END for text in texts]

    async def run() -> tuple[list[list[Said]], Group]:
        parsers = Parsers(family, form.reasoning or None)
        async with open_scripted_stage(config, tokenizer, parsers, script) as stage:
            agents = [await stage.open(), await stage.open()]
            said = []
            for agent, is_streamed in zip(agents, (False, True), strict=True):
                said.append(await converse(form, agent, len(script), is_streamed))
                await agent.reward(float(is_streamed))
            for before, after in zip(stage.client.asked, stage.client.asked[1:], strict=False):
                assert len(after[0]) < len(before[0]) or after[0][: len(before[0])] == before[0]
            return said, await stage.running

    said, group = asyncio.run(run())
    check_recorded(group, script)
    return said


@pytest.mark.parametrize("family", FAMILIES)
def test_a_client_gets_the_calls_of_each_format_and_its_history_is_recognised(
    config: VllmConfig, family: str
):
    form = FORMATS[family]
    answers = make_answers(form)
    wanted = [Said(answer.text, answer.thought, list(answer.calls)) for answer in answers]
    whole, streamed = play(config, family, [form.write(answer) for answer in answers])
    assert whole == wanted
    if family in BREAKS_STREAMS:
        assert streamed != wanted, f"'{BREAKS_STREAMS[family]}' is no longer true"
    else:
        assert streamed == wanted


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_turn_that_is_streamed_again_is_read_as_it_was(config: VllmConfig, thinks: bool, is_first: bool):
    form = FORMATS["step3"]  # the end of a thought in its prompt ends that of an answer
    if not thinks:
        form = replace(form, opens="<think></think>", think=("", ""))
    tokenizer = make_tokenizer(form)
    answers = [replace(WEATHER, thought="One city." * thinks)]
    answers += [] if is_first else [Answer("Sunny.", (), "So." * thinks)]
    asked_for = [*answers, answers[-1]]
    script = [tokenizer(form.write(answer) + END)["input_ids"] for answer in asked_for]

    async def run() -> list[tuple[str, str]]:
        async with open_scripted_stage(config, tokenizer, Parsers("step3", "step3"), script) as stage:
            agent = await stage.open()
            messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
            said = []
            for number, _ in enumerate(asked_for, 1):
                asked: Any = {"model": "any", "messages": messages, "tools": TOOLS}
                async with agent.client.chat.completions.stream(**asked) as stream:
                    message: Any = (await stream.get_final_completion()).choices[0].message
                said.append((getattr(message, "reasoning", ""), (message.content or "").strip()))
                if number < len(answers):
                    told = message.model_dump(exclude_none=True, exclude={"parsed"})
                    told["tool_calls"][0]["function"].pop("parsed_arguments", None)
                    result = {"role": "tool", "tool_call_id": told["tool_calls"][0]["id"], "content": "done"}
                    messages += [told, result]
            branches = list(stage.gateway.manager.find(agent.session["key"]).branches)
            assert [len(branch.told) for branch in branches] == [len(answers)], "the last was asked again"
            await agent.client.close()
            return said

    assert asyncio.run(run()) == [(answer.thought, answer.text) for answer in asked_for]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_call_is_text_and_the_conversation_goes_on(config: VllmConfig, family: str):
    form = FORMATS[family]
    call = form.write(Answer("", WEATHER.calls))
    texts = [call[: call.index("Paris") + len(BROKEN)], form.write(Answer("It is sunny."))]
    whole, _ = play(config, family, texts)
    is_text = BROKEN in whole[0].text
    assert is_text == (family not in TAKES_BROKEN | LOSES_BROKEN), whole[0]
    assert bool(whole[0].calls) == (family in TAKES_BROKEN), whole[0]
    assert whole[1].text == "It is sunny."


@pytest.mark.parametrize("api", ["messages", "responses"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_other_apis_give_the_same_calls(config: VllmConfig, family: str, api: str):
    form = FORMATS[family]
    if form.asks:  # these APIs have no arguments of the template
        form = replace(form, reasoning="", opens="", asks={})
    tokenizer = make_tokenizer(form)
    answers = [form.possible(one) for one in (WEATHER, BOTH, Answer("It is sunny."))]
    results = [["done"] * len(answer.calls) for answer in answers[:-1]]
    script = [tokenizer(form.write(answer) + END)["input_ids"] for answer in answers]

    async def run() -> Group:
        parsers = Parsers(family, form.reasoning or None)
        async with open_scripted_stage(config, tokenizer, parsers, script) as stage:
            for is_streamed in (False, family not in BREAKS_STREAMS):
                agent = await stage.open()
                session: Any = agent.session
                with openai.OpenAI(base_url=session["base_url"], api_key="none", max_retries=0) as client:
                    plain: Any = replace(agent, client=client)  # type: ignore[arg-type]
                    talk = Transcript("How is the weather?", answers, results)
                    said = await asyncio.to_thread(PLAYERS[api], plain, talk, is_streamed)
                assert [text.strip() for text in said] == [answer.text for answer in answers]
                await agent.reward(float(is_streamed))
            return await stage.running

    check_recorded(asyncio.run(run()), script)


def test_a_response_that_its_parser_fails_at_is_text(config: VllmConfig):
    form = FORMATS["dots"]  # it looks for functions among the tools alone
    tokenizer = make_tokenizer(form)
    text = form.write(Answer("", WEATHER.calls))
    tools: Any = [{"type": "custom", "name": "weather"}]

    async def run() -> str:
        script = [tokenizer(text + END)["input_ids"]]
        async with open_scripted_stage(config, tokenizer, Parsers("dots"), script) as stage:
            agent = await stage.open()
            response = await agent.client.responses.create(model="any", input="hello", tools=tools)
            await agent.client.close()
            return response.output_text

    assert asyncio.run(run()) == text


# Which there are


CANNOT = {
    "cohere_command3": "needs the package cohere_melody",
    "cohere_command4": "needs the package cohere_melody",
    "openai": "parses gpt-oss alone, whose chats no template makes: the gateway refuses those",
}
"""Parsers of vLLM that no format stands for here, and why."""


def test_every_tool_parser_of_this_vllm_has_a_format_or_a_reason():
    assert set(ToolParserManager.list_registered()) == set(FORMATS) | set(CANNOT)
    assert set(BREAKS_STREAMS) | TAKES_BROKEN | LOSES_BROKEN <= set(FORMATS)


@pytest.mark.parametrize("family", [name for name in CANNOT if "cohere" in name])
def test_a_parser_without_its_package_cannot_be_loaded(family: str):
    with pytest.raises(ImportError, match="cohere_melody"):
        ParserManager.get_parser(family, enable_auto_tools=True)


def test_the_parser_of_gpt_oss_reads_no_other_model(config: VllmConfig):
    async def run() -> None:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = TEMPLATE
        script = [tokenizer("It is sunny." + END)["input_ids"]]
        async with open_scripted_stage(config, tokenizer, Parsers("openai"), script) as stage:
            agent = await stage.open()
            with pytest.raises(openai.APIStatusError, match="stub"):
                await converse(FORMATS["hermes"], agent, 1, False)

    asyncio.run(run())
