"""Effect of lag on learning, and of each correction: a grid of exact lags and methods.

Lags {0, 1, 4, 16, 64} x {none, naive PPO, decoupled, token TIS, CISPO, GSPO} x 3 seeds on the demo's
task (sort three to five digits), in one process, with the project's objective, batches and Megatron
backend. A cell that is in the JSON file already is not run again, so that the grid can be made in
pieces. `--through-up` repeats some cells with the real system, vLLM and all, where `max_lag` is the bound.
Must never mix cells of different recipes in one file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.options import make_parser, writable
from research.staleness.cell import LAGS, METHODS, SEEDS, Cell, Recipe, run_cell
from research.staleness.report import check, draw, table

NUM_STEPS, NUM_QUICK_STEPS = 300, 160
QUICK_CELLS = ("decoupled/64/0", "none/64/0")
UP_METHODS, UP_LAGS = ("decoupled", "token TIS"), (0, 4)

Say = Callable[[str], None]


def main(arguments: Sequence[str]) -> int:
    """Run the study as the command line says and return the exit code."""
    given = _parse(arguments)
    cells = select_cells(given.cells, given.quick, given.through_up)
    num_steps = given.steps or (NUM_QUICK_STEPS if given.quick else NUM_STEPS)
    results = load_results(given.json, Recipe(num_steps=num_steps))
    kept = "through_up" if given.through_up else "cells"
    run = _run_through_up if given.through_up else _run_here
    end_s = time.monotonic() + given.stop_after_s
    for cell in cells:
        if cell.name in results[kept] or time.monotonic() > end_s:
            continue
        results[kept][cell.name] = run(cell, Recipe(num_steps=num_steps))
        save_results(results, given.json)
    num_done = sum(cell.name in results[kept] for cell in cells)
    _say(f"{num_done} of {len(cells)} cells done")
    print(table(results))
    if given.plot is not None:
        draw(results, given.plot)
    if not given.check:
        return 0
    is_met, verdict = check(results)
    print(verdict)
    return 0 if is_met else 1


def select_cells(pattern: str, quick: bool, through_up: bool) -> list[Cell]:
    """Return the cells to run, seed by seed, so that a broken-off grid is whole for its first seeds.

    Args:
        pattern: Comma-separated beginnings or whole names, such as `decoupled/64,none`; empty for all.
        quick: Only those of `QUICK_CELLS`.
        through_up: Only those that are repeated with the real system.
    """
    methods, lags = (UP_METHODS, UP_LAGS) if through_up else (tuple(METHODS), LAGS)
    cells = [Cell(method, lag, seed) for seed in SEEDS for lag in lags for method in methods]
    if quick and not through_up:
        cells = [cell for cell in cells if cell.name in QUICK_CELLS]
    wanted = [part for part in pattern.split(",") if part]
    return [cell for cell in cells if not wanted or any(f"{cell.name}/".startswith(f"{p}/") for p in wanted)]


def load_results(path: Path | None, recipe: Recipe) -> dict[str, Any]:
    """Return what `path` holds, or an empty record.

    Raises:
        SystemExit: The file holds cells of another recipe.
    """
    described = json.loads(json.dumps(dataclasses.asdict(recipe)))
    methods = json.loads(json.dumps({name: dict(section) for name, section in METHODS.items()}))
    if path is None or not path.exists():
        machine = {"processor": platform.machine(), "cores": os.cpu_count()}
        machine["python"] = platform.python_version()
        start = {"benchmark": "staleness_study", "recipe": described, "methods": methods, "machine": machine}
        return {**start, "cells": {}, "through_up": {}}
    results: dict[str, Any] = json.loads(path.read_text())
    if (results["recipe"], results["methods"]) != (described, methods):
        raise SystemExit(f"{path} holds cells of another recipe: give another file, or the same --steps")
    return results


def save_results(results: dict[str, Any], path: Path | None) -> None:
    """Write the record whole or not at all; a broken-off write leaves the older one."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    lines = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in results.items())
    unfinished.write_text(f"{{\n{lines}\n}}\n")
    unfinished.replace(path)


def _lines(value: Any) -> str:
    """Return JSON with one cell per line: a new cell is one line of a diff."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(part)}" for key, part in value.items()) + "}"


def _run_here(cell: Cell, recipe: Recipe) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    record: dict[str, Any] = rounded(run_cell(cell, recipe, _task_folder()))
    _say(f"{cell.name}: accuracy {record['accuracy'][-1][1]:.3f}, {record['cpu_s']:.0f} CPU-s")
    return record


def _run_through_up(cell: Cell, recipe: Recipe) -> dict[str, Any]:
    from research.staleness.through_up import run_through_up

    record: dict[str, Any] = rounded(run_through_up(cell, recipe, _task_folder(), _say))
    _say(f"{cell.name} through asyncrl up: {record['accuracy_end']:.3f}, mean lag {record['lag_mean']:.2f}")
    return record


def rounded(value: Any) -> Any:
    """Return `value` with every number in it at four significant decimals, for a file that people read."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


def _task_folder() -> Path:
    from asyncrl.planner.plan.prepare import make_builtin

    return make_builtin("builtin:digit_sort", Path("runs").absolute() / "builtin", _say)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(
        "python -m research.staleness.study",
        "Measure what lag does to learning under each correction. --json FILE keeps the cells, and goes on.",
        quick="two cells, fewer steps: within a minute",
    )
    parser.add_argument("--plot", type=writable, metavar="FILE", help="draw the curves there")
    parser.add_argument("--cells", default="", metavar="NAMES", help="such as decoupled/64,none/64/0")
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of every cell (default {NUM_STEPS})")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="start no cell after that")
    parser.add_argument(
        "--through-up", action="store_true", help="run cells with the real system, vLLM and all"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
