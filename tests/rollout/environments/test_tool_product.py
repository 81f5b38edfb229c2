"""The task that needs a tool: its tokens, its prompts, its folder."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.core.config.load import load_config
from configs import shipped
from rollout_service.environments.registry import load_environment
from rollout_service.tasks.digit_sort.vocabulary import BOS, EOS
from rollout_service.tasks.tool_product import warm_start
from rollout_service.tasks.tool_product.examples import MAX_FACTOR, MIN_FACTOR, draw_split
from rollout_service.tasks.tool_product.folder import Recipe, make_folder
from rollout_service.tasks.tool_product.vocabulary import (
    answer_text,
    build_tokenizer,
    call_text,
    encode,
    prompt_text,
    reply_text,
)
from tests.rollout.data.files import load_prompts
from tests.rollout.environments.parts import make_prompt, run_episode

SHORT = Recipe(num_warm_start_steps=2, num_train=60, num_held_out=20)


def test_every_text_of_the_task_is_one_token_per_character():
    tokenizer = build_tokenizer()
    for text in (prompt_text((47, 83)), call_text((47, 83)), reply_text((47, 83)), answer_text((47, 83))):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == encode(text)
    assert tokenizer("47*83=")["input_ids"] == [BOS, *encode("47*83=")]
    assert tokenizer.decode([*encode("?47*83"), EOS], skip_special_tokens=True) == "?47*83"


def test_held_out_pairs_are_new_and_all_factors_have_two_digits():
    split = draw_split(0, 500, 50)
    assert not set(split.train) & set(split.held_out)
    assert len(set(split.held_out)) == 50
    factors = [factor for pair in (*split.train, *split.held_out) for factor in pair]
    assert min(factors) >= MIN_FACTOR and max(factors) <= MAX_FACTOR


def test_the_folder_is_whole_and_a_second_making_leaves_it_alone(tmp_path: Path):
    folder = make_folder(tmp_path / "tool_product", SHORT)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_folder(folder, SHORT) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((folder / "task.json").read_text())["task"] == "tool_product"
    prompts = load_prompts(folder / "train.parquet", AutoTokenizer.from_pretrained(folder), 8)
    assert prompts.num_prompts == 60
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert model(torch.tensor([prompts.at(0).token_ids.tolist()])).logits.shape[-1] == 18


def test_the_shipped_environment_replies_as_the_warm_start_was_taught():
    config = load_config(shipped()["tool_product"])
    assert config.rollout.environment is not None
    episodes = load_environment(config.rollout.environment)
    factors = (47, 83)
    phrases = [(call_text(factors), [1]), (answer_text(factors), [1])]
    prompt = make_prompt(prompt_text(factors), answer_text(factors))
    trajectory, _, _ = run_episode(episodes, phrases, prompt, config.rollout.max_tokens)
    observed = trajectory.response_ids[trajectory.loss_mask == 0]
    assert observed.tolist() == encode(reply_text(factors))
    assert trajectory.reward == 1.0


def test_the_longest_episode_fits_the_shipped_limits():
    config = load_config(shipped()["tool_product"])
    texts = call_text((99, 99)), reply_text((99, 99)), answer_text((99, 99))
    assert sum(len(encode(text)) for text in texts) + len([EOS, EOS]) < config.rollout.max_tokens
    assert len(encode(prompt_text((99, 99)))) + 1 <= config.data.max_prompt_tokens


def test_the_warm_start_is_taught_what_the_model_says_and_nothing_that_it_reads(monkeypatch):
    monkeypatch.setattr(warm_start, "CALL_SHARE", 1.0)
    pieces = warm_start._episode((47, 83), random.Random(0))
    assert [is_said for _, is_said in pieces] == [False, True, False, True]
    assert pieces[2][0] == encode(reply_text((47, 83)))
    monkeypatch.setattr(warm_start, "BATCH_SIZE", 4)
    tokens_BT, targets_BT = warm_start._batch(random.Random(0))
    assert np.all((targets_BT == tokens_BT).numpy() | (targets_BT == 10).numpy())
    assert (targets_BT[:, :7] == 10).all()  # the prompt
