"""Contents of the task's folder: model, tokenizer, `train.parquet`, `eval.parquet` and `task.json`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_service.tasks.digit_sort.examples import Digits, draw_split
from rollout_service.tasks.digit_sort.vocabulary import answer_text, build_tokenizer, prompt_text
from rollout_service.tasks.recipes import make_by_recipe, write_rows
from rollout_service.tasks.warm_started import put_warm_start

log = logging.getLogger(__name__)

TASK = "digit_sort"


@dataclass(frozen=True)
class Recipe:
    """All that decides the content of the folder."""

    seed: int = 0
    num_warm_start_steps: int = 700
    num_train: int = 20_000
    num_held_out: int = 512


def make_folder(folder: Path, recipe: Recipe = Recipe()) -> Path:
    """Make `folder` unless it is complete, and return it.

    Raises:
        DataError: The folder exists, but was not made by this recipe.
    """
    return make_by_recipe(folder, TASK, recipe, _fill)


def _fill(folder: Path, recipe: Recipe) -> dict[str, float]:
    split = draw_split(recipe.seed, recipe.num_train, recipe.num_held_out)
    write_prompts(folder / "train.parquet", split.train, "train")
    write_prompts(folder / "eval.parquet", split.held_out, "eval")
    return put_warm_start(
        folder, Path(__file__).parent, recipe.seed, recipe.num_warm_start_steps, save_warm_start
    )


def save_warm_start(folder: Path, seed: int, num_steps: int) -> dict[str, float]:
    """Train a model and save it with its tokenizer; return its accuracy on held-out lists."""
    from rollout_service.tasks.digit_sort.warm_start import train_warm_start  # imports torch

    held_out = draw_split(seed, 0, Recipe.num_held_out).held_out
    warm_start = train_warm_start(seed, num_steps, held_out)
    warm_start.model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    log.info("warm start: sampled accuracy %.3f on held-out lists", warm_start.accuracy)
    return {"warm_start_accuracy": warm_start.accuracy}


def write_prompts(path: Path, lists: Sequence[Digits], split: str) -> None:
    """Write `lists` as prompts in verl's columns."""
    write_rows(path, TASK, split, ((prompt_text(digits), answer_text(digits)) for digits in lists))
