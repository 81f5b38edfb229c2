"""Warm-started models that ship with their tasks, so that a first run does not train one.

Invariant: `<task>/warm_started` holds what `python -m rollout_service.tasks --again TASK FOLDER` makes,
and in `warm_start.json` the recipe that decides it. A model of any other recipe is trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

SHIPPED = "warm_started"
NOTES = "warm_start.json"

Save = Callable[[Path, int, int], dict[str, float]]
"""(folder, seed, number of steps) -> figures: trains a model; saves it and its tokenizer to the folder."""


def put_warm_start(folder: Path, task: Path, seed: int, num_steps: int, save: Save) -> dict[str, float]:
    """Put the model of (`seed`, `num_steps`) into `folder`: the one that ships in `task`, or a new one.

    Returns:
        The figures of the warm start, for `task.json`.
    """
    notes = json.loads((task / SHIPPED / NOTES).read_text())
    if notes["recipe"] != _recipe(seed, num_steps):
        return save(folder, seed, num_steps)
    for file in sorted((task / SHIPPED).iterdir()):
        if file.name != NOTES:
            shutil.copyfile(file, folder / file.name)
    figures: dict[str, float] = notes["figures"]
    return figures


def make_again(task: str, folder: Path, seed: int, num_steps: int, save: Save) -> str:
    """Make the model that ships with a task in `folder`, and return the text of its notes."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = save(folder, seed, num_steps)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files for their owner alone
    command = f"python -m rollout_service.tasks --again {task} FOLDER"
    notes = {"made_by": command, "recipe": _recipe(seed, num_steps), "figures": figures}
    text = json.dumps(notes, indent=2) + "\n"
    (folder / NOTES).write_text(text)
    return text


def _recipe(seed: int, num_steps: int) -> dict[str, int]:
    return {"seed": seed, "num_warm_start_steps": num_steps}
