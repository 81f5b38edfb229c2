"""The demo task: its tokens, its prompts, its folder and a short warm start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.core.errors import DataError
from rollout_service.tasks.digit_sort.examples import MAX_DIGITS, MIN_DIGITS, draw_split
from rollout_service.tasks.digit_sort.folder import Recipe, make_folder
from rollout_service.tasks.digit_sort.vocabulary import (
    answer_text,
    build_tokenizer,
    encode_prompt,
    prompt_text,
)
from rollout_service.tasks.digit_sort.warm_start import sampled_accuracy, train_warm_start
from tests.rollout.data.files import load_prompts

SHORT = Recipe(num_warm_start_steps=4, num_train=60, num_held_out=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("task") / "digit_sort", SHORT)


def test_the_tokenizer_makes_one_token_per_character_and_puts_bos_in_front():
    tokenizer = build_tokenizer()
    for digits in draw_split(1, 50, 1).train:
        assert tokenizer(prompt_text(digits))["input_ids"] == encode_prompt(digits)


def test_a_decoded_answer_shows_its_digits_and_no_special_token():
    tokenizer = build_tokenizer()
    assert tokenizer.decode([3, 1, 4, 12], skip_special_tokens=True) == "314"
    assert answer_text((3, 1, 4, 1)) == "1134"


def test_lists_have_three_to_five_digits_and_the_held_out_ones_are_not_trained_on():
    split = draw_split(0, 20_000, 512)
    assert (len(split.train), len(split.held_out), len(set(split.held_out))) == (20_000, 512, 512)
    assert {len(digits) for digits in split.train} == set(range(MIN_DIGITS, MAX_DIGITS + 1))
    assert not set(split.train) & set(split.held_out)
    assert draw_split(0, 10, 512).train == split.train[:10]


def test_the_folder_holds_a_model_a_tokenizer_and_prompts_that_fit_together(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    prompts = load_prompts(folder / "train.parquet", tokenizer, 8)
    assert prompts.num_prompts == 60
    first = prompts.at(0)
    digits = [int(character) for character in str(first.prompt.content)[:-1]]
    assert first.token_ids.tolist() == encode_prompt(digits)
    assert first.prompt.ground_truth == answer_text(digits)
    assert load_prompts(folder / "eval.parquet", tokenizer, 8).num_prompts == 20


def test_a_complete_folder_is_left_alone_and_one_of_another_recipe_is_refused(folder: Path):
    before = (folder / "task.json").stat().st_mtime_ns
    assert make_folder(folder, SHORT) == folder
    assert (folder / "task.json").stat().st_mtime_ns == before
    assert json.loads((folder / "task.json").read_text())["recipe"]["num_warm_start_steps"] == 4
    with pytest.raises(DataError, match="another recipe"):
        make_folder(folder, Recipe(seed=1))


def test_a_folder_that_is_something_else_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no digit_sort folder"):
        make_folder(tmp_path, SHORT)


def test_a_warm_start_that_fails_leaves_no_folder(tmp_path: Path):
    with pytest.raises(TypeError):
        make_folder(tmp_path / "a", Recipe(num_warm_start_steps="many", num_train=3, num_held_out=2))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_warm_start_is_decided_by_its_seed():
    probe = draw_split(0, 1, 30).held_out
    first, again, other = (train_warm_start(seed, 2, probe).model.state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_an_untrained_model_sorts_nothing():
    probe = draw_split(0, 1, 60).held_out
    assert sampled_accuracy(train_warm_start(0, 0, probe).model, probe, 0) < 0.05
