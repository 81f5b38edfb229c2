"""Requests of agents: how each follows the one before, and which of its fields are used or replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from asyncrl.control.rows.metering import Meter
from asyncrl.core.config.tree import Config
from asyncrl.core.service import ServiceContext
from rollout_service.data.prompts import PromptSet
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from rollout_service.gateway import parsers
from rollout_service.gateway.conversation.branches import Branch
from rollout_service.gateway.conversation.history import (
    Asked,
    Reply,
    Told,
    asked_in_chat,
    asked_in_completion,
    comparable,
    reply_in_text,
)
from rollout_service.gateway.conversation.transcript import Turn
from rollout_service.gateway.gateway import build_gateway
from rollout_service.gateway.parsers import find_problems
from rollout_service.gateway.refusal import Refusal
from rollout_service.gateway.rules import Rules, find_replaced
from rollout_service.gateway.serving.recorded import StreamedMessage
from tests.statuses import statuses_of

RULES = Rules(run_seed=0, group_size=2, temperature=0.7, max_tokens=20, max_prompt_tokens=10)
STRICT = replace(RULES, is_strict=True)
HELLO = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}
HI = reply_in_text("hi")
KNOWN = {
    "chat": frozenset(ChatCompletionRequest.model_fields),
    "completion": frozenset(CompletionRequest.model_fields),
    "responses": frozenset(ResponsesRequest.model_fields),
    "messages": frozenset(AnthropicMessagesRequest.model_fields),
}
NAMED = {"type": "function", "function": {"name": "search"}}
REPLACED = [
    ("chat", {"temperature": 0.2}),
    ("chat", {"temperature": 0}),
    ("chat", {"top_p": 0.9}),
    ("chat", {"top_p": 0}),
    ("chat", {"top_k": 5}),
    ("chat", {"min_p": 0.1}),
    ("chat", {"n": 2}),
    ("chat", {"n": 0}),
    ("chat", {"presence_penalty": 0.1}),
    ("chat", {"frequency_penalty": -0.1}),
    ("chat", {"repetition_penalty": 1.1}),
    ("chat", {"seed": 0}),
    ("chat", {"logit_bias": {"5": 1}}),
    ("chat", {"response_format": {"type": "json_object"}}),
    ("chat", {"structured_outputs": {"regex": "a"}}),
    ("chat", {"min_tokens": 3}),
    ("chat", {"ignore_eos": True}),
    ("chat", {"skip_special_tokens": False}),
    ("chat", {"use_beam_search": True}),
    ("chat", {"echo": True}),
    ("chat", {"prompt_logprobs": 1}),
    ("chat", {"kv_transfer_params": {"prompt_token_ids": [1]}}),
    ("chat", {"vllm_xargs": {"a": 1}}),
    ("chat", {"session_id": "5.1.0"}),
    ("chat", {"tool_choice": "required"}),
    ("chat", {"tool_choice": NAMED}),
    ("completion", {"suffix": "end"}),
    ("completion", {"prompt_embeds": "AAAA"}),
    ("responses", {"text": {"format": {"type": "json_schema"}}}),
    ("responses", {"truncation": "auto"}),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ("messages", {"tool_choice": {"type": "any"}}),
]
TAKEN = [
    ("chat", {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "n": 1, "presence_penalty": 0, "seed": None}),
    ("chat", {"stop": ["."], "stream": True, "logprobs": True, "top_logprobs": 2, "max_tokens": 5}),
    ("chat", {"return_token_ids": True, "return_tokens_as_token_ids": True}),
    ("chat", {"logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "auto", "user": "me"}),
    ("chat", {"continue_final_message": True, "add_generation_prompt": False, "reasoning_effort": "low"}),
    ("chat", {"a_field_that_vllm_does_not_know": 1, "best_of": 2}),
    ("responses", {"text": {"format": {"type": "text"}}, "truncation": "disabled", "store": True}),
    ("messages", {"output_config": {"effort": "low"}, "tool_choice": {"type": "none"}, "system": "s"}),
]


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def chat(*messages: dict[str, Any], **more: Any) -> Asked:
    return asked_in_chat(messages, more)


# What follows on what


def goes_on(before: Asked, asked: Asked, reply: Reply = HI, ids: tuple[int, ...] = ()) -> bool:
    branch = Branch(0)
    branch.told.append(Told(before, reply))
    branch.transcript.add(Turn(ids[:-1], ids[-1:], (-0.5,) * len(ids[-1:]), (), "stop", reply.text))
    return branch.count_held(asked) == 1


def test_a_conversation_that_goes_on_from_the_recorded_answer_is_the_next_turn():
    before = chat(HELLO)
    added = answer("hi", refusal=None, tool_calls=[], function_call=None, annotations=[])
    assert goes_on(before, chat(HELLO, added, MORE))
    in_parts = answer("", content=[{"type": "text", "text": "hi"}])
    assert goes_on(before, chat(HELLO, in_parts, MORE))


@pytest.mark.parametrize(
    "asked",
    [
        chat(HELLO, answer("ho"), MORE),
        chat(HELLO, answer("hi", tool_calls=[{"id": "1"}]), MORE),
        chat(HELLO),
        chat(HELLO, MORE),
        chat(MORE, answer("hi"), MORE),
        chat(MORE),
        chat({"role": "system", "content": "s"}, HELLO, answer("hi"), MORE),
        chat(HELLO, answer("hi"), MORE, tools=[{"type": "function"}]),
        chat(HELLO, answer("hi"), MORE, chat_template_kwargs={"enable_thinking": False}),
        Asked("text", text="hello"),
    ],
)
def test_a_conversation_with_another_past_does_not_go_on_from_the_answer(asked: Asked):
    assert not goes_on(chat(HELLO), asked)


def test_a_completion_goes_on_where_its_text_or_its_ids_do():
    text, said = asked_in_completion(["ab"]), Reply("cd")
    assert goes_on(text, Asked("text", text="abcd ef"), said)
    assert not goes_on(text, Asked("text", text="abce"), said)
    ids = asked_in_completion([1, 2])
    assert goes_on(ids, Asked("ids", ids=(1, 2, 3, 4)), said, (1, 2, 3))
    assert not goes_on(ids, Asked("ids", ids=(1, 2, 4)), said, (1, 2, 3))


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, "a"], [True]])
def test_a_completion_has_one_prompt(prompt: Any):
    with pytest.raises(Refusal, match="'prompt' must be"):
        asked_in_completion(prompt)


def call(arguments: str, name: str = "search", identity: str = "c1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


PARSED = Reply(
    "<tool_call>...", (comparable(answer("", tool_calls=[call('{"a": 1, "b": "é"}')], reasoning="hm")),)
)
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found"}
SAME = [
    answer("", tool_calls=[call('{"b":"\\u00e9", "a":1}')], reasoning="hm"),
    answer("", content=None, tool_calls=[{**call('{"a": 1, "b": "é"}'), "index": 0}], reasoning_content="hm"),
    answer("", content=[], tool_calls=[call('{"a": 1, "b": "é"}')], provider_specific_fields={"x": 1}),
]
OTHER = [
    answer("", tool_calls=[call('{"a": 2, "b": "é"}')]),
    answer("", tool_calls=[call('{"a": 1, "b": "é"}', name="find")]),
    answer("", tool_calls=[call('{"a": 1, "b": "é"}', identity="c2")]),
    answer("", tool_calls=[call('{"a": 1, "b": "é"')]),
    answer("", tool_calls=[call('{"a": 1, "b": "é"}')], reasoning="hm?"),
    answer("so", tool_calls=[call('{"a": 1, "b": "é"}')]),
    answer(""),
]


@pytest.mark.parametrize("told", SAME)
def test_a_parsed_answer_is_recognised_in_each_form_that_clients_give_it(told: dict[str, Any]):
    assert goes_on(chat(HELLO), chat(HELLO, told, RESULT), PARSED)


@pytest.mark.parametrize("told", OTHER)
def test_a_parsed_answer_that_says_or_calls_something_else_is_a_changed_history(told: dict[str, Any]):
    assert not goes_on(chat(HELLO), chat(HELLO, told, RESULT), PARSED)


def test_a_history_that_was_cut_is_a_changed_one():
    before = chat(HELLO, answer("hi"), MORE)
    for asked in (chat(HELLO), chat(HELLO, answer("hi")), chat(HELLO, answer("hi"), MORE, answer("hi"))):
        assert not goes_on(before, asked, reply_in_text("ho"))


def test_an_answer_that_is_no_message_need_not_be_sent_back():
    silent = Reply("", ())
    assert goes_on(chat(HELLO), chat(HELLO, MORE), silent)
    assert not goes_on(chat(HELLO), chat(MORE, HELLO), silent)


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file", "video_url"])
def test_a_message_that_holds_more_than_text_is_refused(kind: str):
    with pytest.raises(Refusal, match=f"'{kind}': images, audio and files are not served"):
        chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]})


def test_a_stream_makes_the_message_that_its_client_puts_together():
    streamed = StreamedMessage()
    whole = call('{"a": 1, "b": "é"}')
    function = whole["function"]
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning": "h"},
        {"reasoning": "m"},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "search", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "find", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": function["arguments"][:5]}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": function["arguments"][5:]}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
    ):
        streamed.add(delta)
    calls = [whole, call("{}", "find", "c2")]
    assert comparable(streamed.whole()) == comparable(answer("", reasoning="hm", tool_calls=calls))


# Which fields have an effect


@pytest.mark.parametrize(("api", "field"), REPLACED)
def test_a_field_that_would_change_what_is_sampled_is_replaced_and_named(api: str, field: dict[str, Any]):
    assert find_replaced({"max_tokens": 5, **field}, KNOWN[api], RULES) == tuple(field)
    with pytest.raises(Refusal, match=f"'{next(iter(field))}' cannot be") as refused:
        find_replaced({"max_tokens": 5, **field}, KNOWN[api], STRICT)
    assert (refused.value.status, refused.value.code) == (400, "not_trainable")


PARAMETERS = {"type": "object", "properties": {}}
TOOLS = {
    "chat": {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}},
    "responses": {"type": "function", "name": "search", "parameters": PARAMETERS},
    "messages": {"name": "search", "input_schema": PARAMETERS},
}


@pytest.mark.parametrize("api", TOOLS)
def test_a_strict_tool_binds_no_call_and_is_named(api: str):
    tool = TOOLS[api]
    for is_strict, named in ((True, ("tools.strict",)), (False, ()), (None, ())):
        told = {**tool, "strict": is_strict}
        if api == "chat":
            told = {**tool, "function": {**tool["function"], "strict": is_strict}}  # type: ignore[dict-item]
        assert find_replaced({"tools": [tool, told]}, KNOWN[api], RULES) == named
        assert find_replaced({"tools": [tool, told]}, KNOWN["completion"], RULES) == ()
    body = {"tools": [{**TOOLS["messages"], "strict": True}], "temperature": 0.7}
    with pytest.raises(Refusal, match=r"'tools.strict' cannot be True: a call that the model is made to"):
        find_replaced(body, KNOWN["messages"], STRICT)


@pytest.mark.parametrize("rules", [RULES, STRICT])
@pytest.mark.parametrize(("api", "fields"), TAKEN)
def test_default_values_and_harmless_fields_are_taken(api: str, fields: dict[str, Any], rules: Rules):
    assert find_replaced({"messages": [HELLO], **fields}, KNOWN[api], rules) == ()


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_replicas_gateway_is_as_strict_as_its_configuration(tmp_path: Path, is_strict: bool):
    gateway = {"port": 0, **({"strict": True} if is_strict else {})}
    base = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}
    config = Config.model_validate({**base, "rollout": {"gateway": gateway}})
    context = ServiceContext(config, "rollout.0", tmp_path, "test")
    engine: Any = VllmEngine(VllmSettings("m", "float32", 8, 1, 1 << 20))
    built = build_gateway(context, PromptSet((), "digest"), engine, meter=engine)
    assert built is not None and built.manager.rules.is_strict is is_strict


def test_a_parser_that_vllm_lacks_is_named_with_those_that_it_has(monkeypatch: pytest.MonkeyPatch):
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    def problems(engine: str, **gateway: str) -> list[str]:
        base = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "f"}}
        return [*find_problems(Config(**base, rollout={"engine": engine, "gateway": gateway}))]

    for key, known in (
        ("tool_call_parser", sorted(ToolParserManager.list_registered())),
        ("reasoning_parser", sorted(ReasoningParserManager.list_registered())),
    ):
        assert len(known) > 30 and [problems("vllm", **{key: name}) for name in known] == [[]] * len(known)
        told = f"rollout.gateway.{key}: vLLM has no {known[0] + 'x'!r}, perhaps {known[0]}; it has "
        assert problems("sglang", **{key: known[0] + "x"}) == [told + ", ".join(known)]
    monkeypatch.setattr(parsers, "find_spec", lambda name: None)
    (told,) = problems("sglang")
    assert "vLLM, whose forms and parsers" in told and "is not installed; install asyncrl[cpu]" in told


def test_the_rows_count_replaced_parameters_of_all_replicas_and_of_replicas_that_were_replaced():
    def status(busy_s: float, **overridden: int) -> dict[str, Any]:
        return {"tokens": 0, "busy_s": busy_s, "idle_s": 0.0, "overridden": overridden}

    def counts(row: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in row.items() if name.startswith("gateway/")}

    meter = Meter()
    assert (
        counts(meter.update(0.0, statuses_of({"rollout.0": {"tokens": 0, "busy_s": 0.0, "idle_s": 0.0}})))
        == {}
    )
    both = {"rollout.0": status(5.0, temperature=3, n=1), "rollout.1": status(5.0, temperature=2)}
    found = {"gateway/overridden/temperature": 5.0, "gateway/overridden/n": 1.0}
    assert counts(meter.update(1.0, statuses_of(both))) == {"gateway/overridden": 6.0, **found}
    again = {"rollout.0": status(0.1), "rollout.1": status(6.0, temperature=2)}
    assert counts(meter.update(2.0, statuses_of(again))) == {"gateway/overridden": 6.0, **found}
    assert counts(Meter().update(0.0, statuses_of({"rollout.0": status(1.0)}))) == {"gateway/overridden": 0.0}
