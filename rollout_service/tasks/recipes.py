"""Folders that are made by a recipe: whole or not at all, and left alone once they are there.

Invariant: a folder exists only when it is complete, because it is made under another name and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.core.errors import DataError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Recipe = TypeVar("Recipe", bound=DataclassInstance)
else:
    Recipe = TypeVar("Recipe")

log = logging.getLogger(__name__)

MARKER = "task.json"


def make_by_recipe(
    folder: Path, task: str, recipe: Recipe, fill: Callable[[Path, Recipe], dict[str, float]]
) -> Path:
    """Make `folder` unless it is complete, and return it.

    Args:
        task: Name of the task.
        recipe: A dataclass: all that decides the content.
        fill: Puts the content into an empty folder, and returns what is worth noting in `task.json`.

    Raises:
        DataError: The folder exists, but was not made by this recipe.
    """
    if folder.exists():
        _check_recipe(folder, task, recipe)
        log.info("%s is complete", folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        marker = {"task": task, "recipe": asdict(recipe), **fill(unfinished, recipe)}
        (unfinished / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        _rename(unfinished, folder, task, recipe)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_rows(path: Path, task: str, split: str, rows: Iterable[tuple[str, str]]) -> None:
    """Write prompts with their right answers in verl's columns."""
    columns = [
        {
            "data_source": task,
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, (prompt, answer) in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(columns), path)


def _check_recipe(folder: Path, task: str, recipe: Recipe) -> None:
    try:
        found = json.loads((folder / MARKER).read_text())["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} exists and is no {task} folder ({error})", hint="Choose another folder"
        ) from error
    if found != asdict(recipe):
        raise DataError(
            f"{folder} was made by another recipe, {found}", hint="Remove it or choose another folder"
        )


def _rename(unfinished: Path, folder: Path, task: str, recipe: Recipe) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        _check_recipe(folder, task, recipe)  # another process was faster: equal recipes make equal folders
