"""Stored dimensions of named models: those of the published files, and used for names alone."""

from __future__ import annotations

import pytest

from asyncrl.core.config.models.architectures import ModelSize, find_unsupported, read_max_positions
from asyncrl.planner.named_models import NAMED_MODELS, count_weights, find_table

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
}
"""Weights that the hub counts in the safetensors of each; a tied embedding counts once."""


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_a_named_model_has_as_many_weights_as_its_published_files(name: str) -> None:
    assert count_weights(NAMED_MODELS[name]) == PUBLISHED[name]


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_a_named_model_is_one_that_the_learner_can_train(name: str) -> None:
    table = NAMED_MODELS[name]
    assert list(find_unsupported(table)) == []
    assert ModelSize.read(table).head_size in (64, 128) and (read_max_positions(table) or 0) >= 32_768


def test_a_name_is_known_with_its_revision_and_with_the_endings_that_change_no_dimension() -> None:
    plain = find_table("Qwen/Qwen3-8B")
    assert plain is not None and find_table("Qwen/Qwen3-8B@main") == plain
    base = find_table("Qwen/Qwen3-8B-Base")
    assert base is not None and base.items() < plain.items() and read_max_positions(base) is None


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8", "Qwen3-8B", "other/Qwen3-8B", "Qwen/Qwen3-8B-FP8", "-Base"])
def test_a_name_that_only_looks_like_one_is_not_taken_for_it(name: str) -> None:
    assert find_table(name) is None
