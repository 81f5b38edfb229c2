"""Parts of vLLM's serving that the gateway sets otherwise, each seen at the client or at the engine."""

from __future__ import annotations

import asyncio
import gc
import runpy
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from rollout_service.gateway.parsers import Parsers
from rollout_service.gateway.refusal import EpisodeFailed
from rollout_service.tasks.tiny_text import build_tokenizer, make_folder
from tests.docs.pages import YOUR_OWN, write_files
from tests.rollout.gateway.families.formats import FORMATS, Answer
from tests.rollout.gateway.families.scripted_vllm import (
    ScriptedAgent,
    ScriptedStage,
    make_config,
    open_scripted_stage,
)
from tests.rollout.gateway.families.test_gateway_families import END, TOOLS, make_tokenizer
from tests.rollout.gateway.tool_model import WEATHER

TEXT = "It is sunny in Paris."
HELLO = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}
DOCUMENTS = [{"title": "weather", "text": "sunny"}]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder = make_folder(tmp_path_factory.mktemp("serving") / "model")
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3, "top_k": 4, "temperature": 0.1}')
    return make_config(folder)


def serve(
    config: VllmConfig,
    script: Callable[[ScriptedStage, ScriptedAgent], Awaitable[None]],
    texts: Sequence[str] = (TEXT,) * 9,
    family: str = "",
) -> None:
    """Run `script` with a session of a gateway whose model answers with `texts`."""

    async def run() -> None:
        tokenizer = make_tokenizer(FORMATS[family]) if family else build_tokenizer()
        ids = [tokenizer(text + END)["input_ids"] for text in texts]
        async with open_scripted_stage(config, tokenizer, Parsers(family or None), ids) as stage:
            agent = await stage.open()
            await script(stage, agent)
            await agent.client.close()

    asyncio.run(run())


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


def test_no_collection_visits_what_was_there_when_the_gateway_began_to_listen(config: VllmConfig):
    async def script(stage: ScriptedStage, agent: ScriptedAgent) -> None:
        assert gc.get_freeze_count() > len(gc.get_objects())
        assert garbage() is None, "it is not kept for ever with them"

    gc.unfreeze()  # what other tests' engines and pytest froze
    gc.disable()
    try:
        garbage = weakref.ref(Cycle())
        assert garbage() is not None and gc.get_freeze_count() == 0
        serve(config, script)
    finally:
        gc.enable()
        gc.freeze()


def test_no_response_is_stored_even_where_vllm_would(config: VllmConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")

    async def script(stage: ScriptedStage, agent: ScriptedAgent) -> None:
        first = await agent.client.responses.create(model="any", input="hello", store=True)
        assert first.output_text == TEXT
        with pytest.raises(openai.NotFoundError):
            await agent.client.responses.create(model="any", input="more", previous_response_id=first.id)
        assert not stage.gateway.build_app().state.openai_serving_responses.enable_store

    serve(config, script)


@pytest.mark.parametrize("api", ["chat", "completion", "responses", "messages"])
def test_what_the_models_maker_recommends_has_no_say(config: VllmConfig, api: str):
    assert config.model_config.get_diff_sampling_param()["max_tokens"] == 3, "it is read"

    async def script(stage: ScriptedStage, agent: ScriptedAgent) -> None:
        client: Any = agent.client
        if api == "chat":
            said = (await client.chat.completions.create(model="any", messages=[HELLO])).choices[0]
            assert said.message.content == TEXT
        elif api == "completion":
            said = (await client.completions.create(model="any", prompt="hello", max_tokens=500)).choices[0]
            assert said.text == TEXT
        elif api == "responses":
            assert (await client.responses.create(model="any", input="hello")).output_text == TEXT
        else:
            body = {"model": "any", "messages": [HELLO], "max_tokens": 500}
            reply = await client.post("/messages", body=body, cast_to=object)
            assert reply["content"][0]["text"] == TEXT
        params = stage.client.asked[-1][1]
        assert (params.temperature, params.top_k) == (1.0, 0)

    serve(config, script)


FRAMES: dict[str, Any] = {
    "chat_template_kwargs": {"thinking": True},
    "documents": DOCUMENTS,
    "reasoning_effort": "low",
    "tools": TOOLS,
}


@pytest.mark.parametrize("field", FRAMES)
def test_another_frame_is_another_conversation(config: VllmConfig, field: str):
    async def script(stage: ScriptedStage, agent: ScriptedAgent) -> None:
        async def ask(*messages: Any, **more: Any) -> Any:
            asked: Any = {"model": "any", "messages": list(messages), "extra_body": more}
            return (await agent.client.chat.completions.create(**asked)).choices[0].message

        branches = stage.gateway.manager.find(agent.session["key"]).branches
        framed = {field: FRAMES[field]}
        said = await ask(HELLO, **framed)
        said = await ask(HELLO, said, MORE, **framed)
        assert len(list(branches)) == 1, "the same frame goes on"
        await ask(HELLO, said, MORE)
        assert len(list(branches)) == 2

    serve(config, script, family="hermes")


def test_another_reasoning_of_a_response_is_another_conversation(config: VllmConfig):
    async def script(stage: ScriptedStage, agent: ScriptedAgent) -> None:
        branches = stage.gateway.manager.find(agent.session["key"]).branches
        items: list[Any] = [HELLO]
        for effort, num_branches in (("low", 1), ("low", 1), ("high", 2)):
            asked: Any = {"model": "any", "input": items, "reasoning": {"effort": effort}}
            answer = await agent.client.responses.create(**asked)
            items += [*(item.model_dump(exclude_none=True) for item in answer.output), MORE]
            assert len(list(branches)) == num_branches

    serve(config, script)


@pytest.mark.parametrize(("family", "has_spaces"), [("hermes", True), ("kimi_k3", False)])
def test_text_is_decoded_as_its_parser_wants_it(config: VllmConfig, family: str, has_spaces: bool):
    form = FORMATS[family]

    async def script(stage: ScriptedStage, agent: ScriptedAgent) -> None:
        asked: Any = {"model": "any", "messages": [HELLO], "tools": TOOLS}
        message = (await agent.client.chat.completions.create(**asked)).choices[0].message
        assert [call.function.name for call in message.tool_calls or ()] == ["weather"]
        params = stage.client.asked[-1][1]
        decoded = (params.skip_special_tokens, params.spaces_between_special_tokens)
        assert decoded == (False, has_spaces)

    serve(config, script, [form.write(Answer("", WEATHER.calls))], family)


def test_a_strict_tool_is_named_and_counted_and_binds_nothing(config: VllmConfig):
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    request = ChatCompletionRequest(model="any", messages=[HELLO], tools=strict)
    parser = ParserManager.get_parser("qwen3_coder", enable_auto_tools=True)
    of_vllm = parser(make_tokenizer(FORMATS["qwen3_coder"]), request.tools).adjust_request(request)
    assert of_vllm.structured_outputs is not None, "vLLM's server binds the calls to the schema"

    async def script(stage: ScriptedStage, agent: ScriptedAgent) -> None:
        for tools, named in (strict, "tools.strict"), (TOOLS, None):
            asked: Any = {"model": "any", "messages": [HELLO], "tools": tools}
            reply = await agent.client.chat.completions.with_raw_response.create(**asked)
            assert reply.headers.get("x-asyncrl-overridden") == named
            assert reply.parse().choices[0].message.content == TEXT
            assert stage.client.asked[-1][1].structured_outputs is None
        assert stage.gateway.status().overridden == {"tools.strict": 1}

    serve(config, script, family="qwen3_coder")


def test_the_agent_of_the_docs_gives_its_group_up_when_a_call_fails(config: VllmConfig, tmp_path: Path):
    write_files(YOUR_OWN / "agent.md", tmp_path)
    run_episode = runpy.run_path(str(tmp_path / "agent.py"))["run_episode"]

    async def run() -> None:
        script = [build_tokenizer()(TEXT)["input_ids"]]
        async with open_scripted_stage(config, build_tokenizer(), Parsers(), script) as stage:
            with pytest.raises(openai.BadRequestError, match="validation errors"):  # the prompt is no chat
                await asyncio.to_thread(run_episode, stage.gateway.url)
            with pytest.raises(EpisodeFailed, match=r"agent_failed.*BadRequestError"):
                await asyncio.wait_for(stage.running, 20.0)  # a third of the session's deadline

    asyncio.run(run())
