"""Stored dimensions of named models: those of the published files, and used for names alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.models.architectures import ModelSize, find_unsupported, read_max_positions
from asyncrl.models.named_models import NAMED_MODELS, count_weights, find_table
from asyncrl.planner import plan
from asyncrl.planner.plan.footprint import shared_memory
from asyncrl.planner.plan.footprint.memory import LEARNER_GPU, ROLLOUT_GPU
from asyncrl.planner.plan.models import table_of
from tests.planner.plan.model_folder import SIZES, write_model_folder

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


def make_config(path: str, **learner: object) -> Config:
    return Config(
        model={"path": path},
        data={"train": "t"},
        reward={"fn": "gsm8k"},
        rollout={"gpus": 1},
        learner={"gpus": 1, "tp": 4} | learner,
    )


def test_a_plan_of_a_named_model_counts_it_before_it_is_fetched_and_says_so() -> None:
    found = plan.check_elsewhere(make_config("Qwen/Qwen3-8B"))
    sizes = {(part.where, part.what): part.num_bytes for part in found.memory}
    assert sizes[ROLLOUT_GPU, "engine"] == 2 * PUBLISHED["Qwen/Qwen3-8B"]
    assert sizes[LEARNER_GPU, "policy and its optimizer"] == 18 * PUBLISHED["Qwen/Qwen3-8B"] // 4
    (told,) = (line for line in found.not_checked if line.startswith("model.path"))
    assert told.endswith("is fetched at `up`; until then the stored dimensions are used")
    unknown = plan.check_elsewhere(make_config("some/other"))
    assert not any(part.where == ROLLOUT_GPU for part in unknown.memory)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tp": 3}, r"learner\.tp: 3 does not divide the model's 8 key/value heads"),
        (
            {"max_tokens_per_microbatch": 65536},
            "may have .* 50512 tokens, and the model knows 40960 positions",
        ),
    ],
)
def test_a_named_model_is_checked_against_cuts_and_lengths(changes: dict[str, int], told: str) -> None:
    config = make_config("Qwen/Qwen3-8B", **changes)
    if "tp" not in changes:
        rollout = config.rollout.model_copy(update={"max_tokens": 50_000})
        config = config.model_copy(update={"rollout": rollout})
    with pytest.raises(ConfigError, match=told):
        plan.check_elsewhere(config)


def test_a_folder_of_that_name_goes_before_the_stored_dimensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shared_memory.count_weights("Qwen/Qwen3-8B") == PUBLISHED["Qwen/Qwen3-8B"]
    write_model_folder(Path("Qwen").absolute(), **SIZES).rename(tmp_path / "small")
    Path("Qwen").mkdir()
    Path("small").rename("Qwen/Qwen3-8B")
    num_weights = shared_memory.count_weights("Qwen/Qwen3-8B")
    assert num_weights is not None and num_weights < 1_000_000
    assert table_of("Qwen/Qwen3-8B")["hidden_size"] == SIZES["hidden_size"]
