"""Fields of an agent's request: used, ignored as vLLM does, or replaced by the run's and counted."""

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
from rollout_service.gateway.gateway import build_gateway
from rollout_service.gateway.refusal import Refusal
from rollout_service.gateway.rules import Rules, find_replaced
from tests.statuses import statuses_of

RULES = Rules(run_seed=0, group_size=2, temperature=0.7, max_tokens=20, max_prompt_tokens=10)
STRICT = replace(RULES, is_strict=True)
HELLO = {"role": "user", "content": "hello"}
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
    ("chat", {"logit_bias": {}, "response_format": {"type": "text"}, "tool_choice": "auto", "user": "me"}),
    ("chat", {"continue_final_message": True, "add_generation_prompt": False, "reasoning_effort": "low"}),
    ("chat", {"a_field_that_vllm_does_not_know": 1, "best_of": 2}),
    ("responses", {"text": {"format": {"type": "text"}}, "truncation": "disabled", "store": True}),
    ("messages", {"output_config": {"effort": "low"}, "tool_choice": {"type": "none"}, "system": "s"}),
]


@pytest.mark.parametrize(("api", "field"), REPLACED)
def test_a_field_that_would_change_what_is_sampled_is_replaced_and_named(api: str, field: dict[str, Any]):
    assert find_replaced({"max_tokens": 5, **field}, KNOWN[api], RULES) == tuple(field)
    with pytest.raises(Refusal, match=f"'{next(iter(field))}' cannot be") as refused:
        find_replaced({"max_tokens": 5, **field}, KNOWN[api], STRICT)
    assert (refused.value.status, refused.value.code) == (400, "not_trainable")


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
