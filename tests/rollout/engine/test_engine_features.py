"""Features that the adapter needs of vLLM, looked for in the installed vLLM, name by name."""

from __future__ import annotations

import dataclasses
from dataclasses import fields, replace
from typing import Any

import pytest

from asyncrl.core.errors import EngineError
from rollout_service.engine.vllm.engine import VllmSettings, _engine_arguments
from rollout_service.engine.vllm.features import NEEDED, Feature, check_features, find_missing
from rollout_service.engine.vllm.variant import VARIANT


@pytest.fixture(scope="module")
def engine_class() -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM


def remove(engine_class: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the attribute away, from the protocol that the class inherits too."""
    for owner in engine_class.__mro__:
        if name in vars(owner):
            monkeypatch.delattr(owner, name)


def test_the_installed_vllm_has_all_that_is_needed():
    check_features()


@pytest.mark.parametrize(
    ("feature", "missing"),
    [
        (Feature("json", "dumps", ("obj", "indent")), []),
        (Feature("json", "dumps", ("weight_version",)), ["json.dumps(weight_version)"]),
        (Feature("json", "JSONEncoder.encode", ("o",)), []),
        (Feature("json", "JSONEncoder.pause", ("mode",)), ["json.JSONEncoder.pause"]),
        (Feature("json.reload", "initialize"), ["json.reload.initialize"]),
        (
            Feature("asyncrl.core.staleness", "Span", ("version", "color")),
            ["asyncrl.core.staleness.Span(color)"],
        ),
    ],
)
def test_a_module_a_name_or_a_parameter_that_is_missing_is_written_as_in_code(
    feature: Feature, missing: list[str]
):
    assert list(find_missing(feature)) == missing


@pytest.mark.parametrize("feature", [feature for feature in NEEDED if "AsyncLLM." in feature.name], ids=str)
def test_each_call_that_the_adapter_makes_is_missed_if_it_goes(
    feature: Feature, engine_class: Any, monkeypatch: pytest.MonkeyPatch
):
    name = feature.name.removeprefix("AsyncLLM.")
    remove(engine_class, name, monkeypatch)
    with pytest.raises(EngineError, match=rf"this vllm has no .*AsyncLLM\.{name}"):
        check_features()


def test_all_that_is_missing_is_named_at_once(engine_class: Any, monkeypatch: pytest.MonkeyPatch):
    async def pause_generation(self: Any, *, clear_cache: bool) -> None:
        """An older one, which knows no modes."""

    monkeypatch.setattr(engine_class, "pause_generation", pause_generation)
    remove(engine_class, "update_weight_version", monkeypatch)
    with pytest.raises(EngineError, match="pause_generation") as refusal:
        check_features()
    assert "AsyncLLM.pause_generation(mode)" in str(refusal.value)
    assert "AsyncLLM.update_weight_version" in str(refusal.value)
    assert "Install vllm 0.32" in str(refusal.value)


def test_every_needed_feature_says_where_it_is():
    assert all(feature.module.startswith("vllm.") for feature in NEEDED)
    assert len({dataclasses.astuple(feature)[:2] for feature in NEEDED}) == len(NEEDED)


def test_the_head_sizes_that_plan_knows_are_those_of_vllms_attention_on_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    assert list(VARIANT.cpu_head_sizes) == CPUAttentionBackend.get_supported_head_sizes()
    assert [VARIANT.cpu_latent_size] == CPUMLABackend.get_supported_head_sizes()


def test_the_arguments_that_are_not_free_are_arguments_of_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    owned = {*(VARIANT.owned_args or ()), *VARIANT.owned_args_on_cpu}
    assert owned <= {argument.name for argument in fields(AsyncEngineArgs)}
    settings = VllmSettings("m", "float32", 8, 1, 1 << 20)
    both = {*_engine_arguments(settings), *_engine_arguments(replace(settings, num_gpus=2))}
    assert both - owned == {"max_num_batched_tokens"}, "what a replica sets is refused, or a default"
