"""A cell of the staleness study repeated with the real system: vLLM, weight sync, buffer, learner.

Owns the translation of a cell into the shipped `quickstart` configuration; whatever the study does not
vary is the same in both. What differs by nature: the cell's lag is exact, here it is the bound `max_lag`
and the lag of the tokens spreads below it. `ready_batches` lets batches wait, which brings it closer:
rollouts then run ahead as far as the bound allows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.control.record.rundir import read_json
from asyncrl.core.config.load import load_config
from asyncrl.core.errors import ServiceFailed
from benchmarks.fleet.parts.whole_run import run_to_end
from configs import shipped
from research.staleness.cell import MAX_TOKENS, METHODS, Cell, Recipe

KEPT = ("accuracy_start", "accuracy_end", "steps", "lag_mean", "lag_max_trained", "masked_share", "train_s")


def run_through_up(cell: Cell, recipe: Recipe, task: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run `cell` as `asyncrl up` runs it, to its end, and return the figures of its summary.

    Raises:
        ServiceFailed: The run failed, or was not over in time.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        config = load_config(shipped()["quickstart"], settings_of(cell, recipe, task, Path(folder)))
        summary = read_json(run_to_end(config, say).summary)
    if summary is None:
        raise ServiceFailed(f"the run of {cell.name} left no summary")
    return {"method": cell.method, "lag": cell.lag, "seed": cell.seed} | {key: summary[key] for key in KEPT}


def settings_of(cell: Cell, recipe: Recipe, task: Path, folder: Path) -> list[str]:
    """Return the `--set` values that make `quickstart` the run of `cell`, writing to `folder`."""
    values: dict[str, Any] = {
        "run.name": "cell",
        "run.dir": folder,
        "run.seed": cell.seed,
        "model.path": task,
        "data.train": task / "train.parquet",
        "data.eval": task / "eval.parquet",
        "rollout.group_size": recipe.group_size,
        "rollout.max_tokens": MAX_TOKENS,
        "staleness.max_lag": cell.lag,
        "staleness.ready_batches": cell.lag + 1,
        "learner.groups_per_step": recipe.groups_per_step,
        "learner.minibatches": recipe.minibatches,
        "learner.lr": recipe.lr,
        "learner.lr_schedule": "constant",
        "learner.warmup_steps": recipe.warmup_steps,
        "learner.steps": recipe.num_steps,
        "eval.every_steps": recipe.evaluate_every,
        "eval.prompts": recipe.num_evaluation_prompts,
        "checkpoint.every_steps": 1_000_000,
        "buffer.journal": "none",
    }
    values |= {f"algorithm.{key}": _as_yaml(value) for key, value in METHODS[cell.method].items()}
    return [f"{key}={value}" for key, value in values.items()]


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
