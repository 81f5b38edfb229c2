"""The models that ship with their tasks know the format and not the skill; a command makes them again."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rollout_service.tasks import digit_sort, tool_product
from rollout_service.tasks.digit_sort.examples import Digits, draw_split
from rollout_service.tasks.digit_sort.folder import Recipe, make_folder
from rollout_service.tasks.digit_sort.folder import save_warm_start as save_sorter
from rollout_service.tasks.digit_sort.vocabulary import EOS, encode_prompt
from rollout_service.tasks.tool_product.examples import draw_split as draw_products
from rollout_service.tasks.tool_product.folder import save_warm_start as save_products
from rollout_service.tasks.tool_product.vocabulary import VOCABULARY as PRODUCT_VOCABULARY
from rollout_service.tasks.tool_product.vocabulary import answer_text, call_text, encode, prompt_text
from rollout_service.tasks.warm_started import NOTES, SHIPPED

DIGIT_SORT = Path(digit_sort.__file__).parent / SHIPPED
TOOL_PRODUCT = Path(tool_product.__file__).parent / SHIPPED
HELD_OUT = draw_split(0, 0, 512).held_out
FOUND_BY_CHANCE = (0.8, 1.2)
"""Bounds of (probability of the sorted answer) / (that of a shuffle); a few steps of training leave them."""


def answer_probabilities(
    model: torch.nn.Module, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> torch.Tensor:
    """Return the probability of each answer, end of sequence included, at temperature 1."""
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    tokens_BT = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    with torch.no_grad():
        logprobs_BTV = model(tokens_BT[:, :-1], use_cache=False).logits.log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None])[:, :, 0]
    spans = [(len(prompt) - 1, len(row) - 1) for prompt, row in zip(prompts, rows, strict=True)]
    sums = [logprobs_BT[row, start:end].sum() for row, (start, end) in enumerate(spans)]
    return torch.stack(sums).exp()


def chance_of(digits: Digits) -> float:
    """Return how often a shuffle of `digits` is sorted."""
    return math.prod(map(math.factorial, Counter(digits).values())) / math.factorial(len(digits))


def gain_over_chance(model: torch.nn.Module, lists: Sequence[Digits]) -> float:
    """Return (mean probability of the sorted answer) / (that of a shuffle)."""
    prompts = [encode_prompt(digits) for digits in lists]
    found = answer_probabilities(model, prompts, [[*sorted(digits), EOS] for digits in lists])
    return float(found.sum()) / sum(map(chance_of, lists))


@pytest.fixture(scope="module")
def sorter() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DIGIT_SORT).eval()


@pytest.mark.parametrize("length", [3, 4, 5])
def test_the_shipped_model_finds_the_sorted_answer_as_often_as_a_shuffle(
    sorter: torch.nn.Module, length: int
) -> None:
    lists = [digits for digits in HELD_OUT if len(digits) == length]
    assert len(lists) > 100
    low, high = FOUND_BY_CHANCE
    assert low < gain_over_chance(sorter, lists) < high


def test_a_model_that_was_taught_a_little_of_the_task_is_told_from_one_that_was_not() -> None:
    model = AutoModelForCausalLM.from_pretrained(DIGIT_SORT)
    lists = [digits for digits in draw_split(1, 2000, 1).train if len(digits) == 4][:256]
    tokens_BT = torch.tensor([[*encode_prompt(digits), *sorted(digits), EOS] for digits in lists])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(8):
        logits_BTV = model(tokens_BT[:, :-1], use_cache=False).logits[:, 5:]
        torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), tokens_BT[:, 6:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    four = [digits for digits in HELD_OUT if len(digits) == 4]
    assert gain_over_chance(model.eval(), four) > 1.5 * FOUND_BY_CHANCE[1]


def test_the_shipped_model_answers_with_the_digits_of_its_prompt(sorter: torch.nn.Module) -> None:
    lists = [digits for digits in HELD_OUT if len(digits) == 3][:50]
    answers = [sorted(set(itertools.permutations(digits))) for digits in lists]
    prompts = [encode_prompt(digits) for digits, orders in zip(lists, answers, strict=True) for _ in orders]
    found = answer_probabilities(sorter, prompts, [[*order, EOS] for orders in answers for order in orders])
    assert float(found.sum()) / len(lists) > 0.9


def test_the_shipped_model_of_products_knows_none_and_calls_its_tool_now_and_then() -> None:
    check_products(AutoModelForCausalLM.from_pretrained(TOOL_PRODUCT).eval())


def check_products(model: torch.nn.Module) -> None:
    pairs = draw_products(0, 0, 256).held_out
    prompts = [[PRODUCT_VOCABULARY["<bos>"], *encode(prompt_text(factors))] for factors in pairs]
    right = answer_probabilities(model, prompts, [[*encode(answer_text(pair)), EOS] for pair in pairs])
    calls = answer_probabilities(model, prompts, [[*encode(call_text(pair)), EOS] for pair in pairs])
    assert float(right.mean()) < 0.002, "a guess among the products of that many digits"
    assert 0.1 < float(calls.mean()) < 0.6


def test_a_folder_of_the_shipped_recipe_holds_the_shipped_model_and_one_of_another_does_not(
    tmp_path: Path,
) -> None:
    shipped = make_folder(tmp_path / "shipped", Recipe(num_train=5, num_held_out=5))
    names = {file.name for file in DIGIT_SORT.iterdir()} - {NOTES}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert all((shipped / name).read_bytes() == (DIGIT_SORT / name).read_bytes() for name in names)
    notes = json.loads((DIGIT_SORT / NOTES).read_text())
    assert json.loads((shipped / "task.json").read_text()).items() >= notes["figures"].items()
    other = make_folder(
        tmp_path / "other", Recipe(seed=1, num_warm_start_steps=1, num_train=5, num_held_out=5)
    )
    assert (other / "model.safetensors").read_bytes() != (DIGIT_SORT / "model.safetensors").read_bytes()


def check_sorting(model: torch.nn.Module) -> None:
    low, high = FOUND_BY_CHANCE
    assert low < gain_over_chance(model, HELD_OUT) < high


TASKS = {
    "digit_sort": (DIGIT_SORT, save_sorter, check_sorting),
    "tool_product": (TOOL_PRODUCT, save_products, check_products),
}


def distance_between(one: Path, other: Path) -> float:
    """Return the root mean square of the differences of two models' weights."""
    left, right = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert {name: tensor.shape for name, tensor in left.items()} == {
        name: tensor.shape for name, tensor in right.items()
    }
    differences = torch.cat([(left[name] - right[name]).flatten() for name in left])
    return float(differences.double().square().mean().sqrt())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["", "default"])
@pytest.mark.parametrize("task", TASKS)
def test_the_command_makes_the_shipped_model_again(tmp_path: Path, task: str, capability: str) -> None:
    """With the kernels of another processor the weights differ a little, and the quality does not."""
    shipped, save, check = TASKS[task]
    command = [sys.executable, *json.loads((shipped / NOTES).read_text())["made_by"].split()[1:-1]]
    environment = {**os.environ, **({"ATEN_CPU_CAPABILITY": capability} if capability else {})}
    made, other = tmp_path / "made", tmp_path / "other"
    subprocess.run([*command, str(made)], env=environment, check=True, timeout=600)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (made / name).read_text() == (shipped / name).read_text()
    save(other, 1, 1)
    distance, apart = distance_between(made, shipped), distance_between(other, shipped)
    print(f"distance to the shipped weights: {distance:.3g}, of another seed {apart:.3g}")
    assert distance < apart / 4
    check(AutoModelForCausalLM.from_pretrained(made).eval())
