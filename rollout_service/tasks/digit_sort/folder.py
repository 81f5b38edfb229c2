"""Makes the task's folder: model, tokenizer, `train.parquet`, `eval.parquet` and `task.json`.

Invariant: the folder exists only when it is complete, because it is made under another name and
renamed. A complete folder of the same recipe is left alone.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.errors import DataError
from rollout_service.tasks.digit_sort.examples import Digits, draw_split
from rollout_service.tasks.digit_sort.vocabulary import answer_text, build_tokenizer, prompt_text

log = logging.getLogger(__name__)

DATA_SOURCE = "digit_sort"
MARKER = "task.json"


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
    if folder.exists():
        _check_recipe(folder, recipe)
        log.info("%s is complete", folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        _fill(unfinished, recipe)
        _rename(unfinished, folder, recipe)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _check_recipe(folder: Path, recipe: Recipe) -> None:
    marker = folder / MARKER
    try:
        found = json.loads(marker.read_text())["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} exists and is no digit_sort folder ({error})", hint="Choose another folder"
        ) from error
    if found != asdict(recipe):
        raise DataError(
            f"{folder} was made by another recipe, {found}", hint="Remove it or choose another folder"
        )


def _rename(unfinished: Path, folder: Path, recipe: Recipe) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        _check_recipe(folder, recipe)  # another process was faster: equal recipes make equal folders


def _fill(folder: Path, recipe: Recipe) -> None:
    # Imports torch: only when a folder has to be made.
    from rollout_service.tasks.digit_sort.warm_start import train_warm_start

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    split = draw_split(recipe.seed, recipe.num_train, recipe.num_held_out)
    write_prompts(folder / "train.parquet", split.train, "train")
    write_prompts(folder / "eval.parquet", split.held_out, "eval")
    warm_start = train_warm_start(recipe.seed, recipe.num_warm_start_steps, split.held_out)
    warm_start.model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    log.info("warm start: sampled accuracy %.3f on held-out lists", warm_start.accuracy)
    marker = {"task": DATA_SOURCE, "recipe": asdict(recipe), "warm_start_accuracy": warm_start.accuracy}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def write_prompts(path: Path, lists: Sequence[Digits], split: str) -> None:
    """Write `lists` as prompts in verl's columns."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": prompt_text(digits),
            "reward_model": {"style": "rule", "ground_truth": answer_text(digits)},
            "extra_info": {"split": split, "index": index},
        }
        for index, digits in enumerate(lists)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
