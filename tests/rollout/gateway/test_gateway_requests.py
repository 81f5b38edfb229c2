"""Fields of an agent's request: used, replaced by the run's and counted, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.rows.metering import Meter
from asyncrl.core.config.tree import Config
from asyncrl.core.service import ServiceContext
from rollout_service.data.prompts import PromptSet
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from rollout_service.gateway.gateway import build_gateway
from rollout_service.gateway.refusal import Refusal
from rollout_service.gateway.rules import Rules, admit
from tests.statuses import statuses_of

RULES = Rules(run_seed=0, group_size=2, temperature=0.7, max_tokens=20, max_prompt_tokens=10)
STRICT = replace(RULES, is_strict=True)
HELLO = {"role": "user", "content": "hello"}
DIFFERENT = [
    {"temperature": 0.2},
    {"temperature": 0},
    {"top_p": 0.9},
    {"top_p": 0},
    {"top_k": 5},
    {"min_p": 0.1},
    {"n": 2},
    {"n": 0},
    {"best_of": 2},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
    {"repetition_penalty": 1.1},
    {"seed": 0},
]
REFUSED = [
    {"logit_bias": {"5": 1}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"min_tokens": 3},
    {"ignore_eos": True},
    {"skip_special_tokens": False},
    {"use_beam_search": True},
    {"echo": True},
    {"prompt_logprobs": 1},
    {"continue_final_message": True},
    {"add_generation_prompt": False},
    {"kv_transfer_params": {"prompt_token_ids": [1]}},
    {"vllm_xargs": {"a": 1}},
    {"unknown_field": 1},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "search"}}},
]


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_sampling_parameter_that_differs_from_the_runs_is_replaced_and_named(field: dict[str, Any]):
    body = {"messages": [HELLO], "max_tokens": 5}
    admitted = admit({**body, **field}, RULES)
    assert (admitted.body, admitted.overridden) == (body, tuple(field))


@pytest.mark.parametrize(
    ("field", "rules"),
    [*((field, RULES) for field in REFUSED), *((field, STRICT) for field in DIFFERENT + REFUSED)],
)
def test_an_untrainable_field_is_refused_by_name(field: dict[str, Any], rules: Rules):
    with pytest.raises(Refusal, match=f"'{next(iter(field))}' cannot be") as refused:
        admit({"messages": [HELLO], **field}, rules)
    assert (refused.value.status, refused.value.code) == (400, "not_trainable")


@pytest.mark.parametrize("field", [{"temperature": "hot"}, {"top_k": True}, {"seed": [1]}])
def test_a_sampling_parameter_that_is_no_number_is_refused(field: dict[str, Any]):
    with pytest.raises(Refusal, match="must be a number"):
        admit({"messages": [HELLO], **field}, RULES)


@pytest.mark.parametrize("rules", [RULES, STRICT])
def test_default_values_and_harmless_fields_pass(rules: Rules):
    neutral = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "n": 1, "presence_penalty": 0, "seed": None}
    free = {"stop": ["."], "stream": True, "logprobs": True, "top_logprobs": 2, "max_tokens": 5, "user": "me"}
    body = {"messages": [HELLO], **neutral, **free, "logit_bias": {}, "response_format": {"type": "text"}}
    admitted = admit(body, rules)
    assert (admitted.body, admitted.overridden) == (body, ())


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_tools_go_to_the_template_and_no_tool_call_is_parsed(choice: dict[str, str]):
    tools = [{"type": "function", "function": {"name": "search"}}]
    admitted = admit({"messages": [HELLO], "tools": tools, **choice}, STRICT)
    assert admitted.body == {"messages": [HELLO], "tools": tools, "tool_choice": "none"}
    assert admit({"messages": [HELLO], **choice}, STRICT).body == {"messages": [HELLO]}


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
