"""Runs of the study of quantised rollouts: `asyncrl up` with the shipped `quickstart`, and their figures."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.core.config.load import load_config
from asyncrl.core.errors import ServiceFailed
from benchmarks.fleet.parts.whole_run import run_to_end
from configs import shipped
from learner.guard.signals import GAP
from rollout_service.tasks.digit_sort.folder import make_folder

KINDS, LAGS, SEEDS = (None, "int8"), (1, 16), (0, 1, 2)


@dataclass(frozen=True)
class Cell:
    """One run."""

    quantization: str | None
    max_lag: int
    seed: int


CELLS = tuple(Cell(kind, lag, seed) for seed in SEEDS for lag in LAGS for kind in KINDS)


def settings_of(cell: Cell, num_steps: int, task: Path, folder: Path) -> list[str]:
    """Return the `--set` values that make `quickstart` the run of `cell`, writing to `folder`."""
    values = {
        "run.name": "cell",
        "run.dir": folder,
        "run.seed": cell.seed,
        "model.path": task,
        "data.train": task / "train.parquet",
        "data.eval": task / "eval.parquet",
        "rollout.quantization": json.dumps(cell.quantization),
        "staleness.max_lag": cell.max_lag,
        "staleness.ready_batches": cell.max_lag + 1,
        "learner.steps": num_steps,
        "checkpoint.every_steps": num_steps,
        "buffer.journal": "none",
    }
    return [f"{key}={value}" for key, value in values.items()]


def measure(cell: Cell, num_steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Do the run and return its row.

    Raises:
        ServiceFailed: It failed, was not over in time, or left no summary.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        task = make_folder(Path(scratch) / "task")
        settings = settings_of(cell, num_steps, task, Path(scratch))
        folder = run_to_end(load_config(shipped()["quickstart"], settings), say)
        summary = read_json(folder.summary)
        if summary is None:
            raise ServiceFailed(f"the run of {cell} left no summary")
        return {
            **asdict(cell),
            "accuracy": summary["accuracy_end"],
            "lag": summary["lag_mean"],
            "gap": statistics.fmean(read_gaps(folder)),
        }


def read_gaps(folder: RunDir) -> list[float]:
    """Return the gap of each step that tells one."""
    rows = map(json.loads, folder.metrics.read_text(encoding="utf-8").splitlines())
    return [row[GAP] for row in rows if row.get(GAP) is not None]
