"""Cost to learning of an engine with INT8 weights, alone and together with lag.

    python -m research.quantization.study [--quick] [--json FILE] [--check]

Each cell is `asyncrl up` with the shipped `quickstart`: vLLM, weight sync, learner and all. What varies is
`rollout.quantization`, `staleness.max_lag` (with `ready_batches`, so that tokens come near the bound) and the
seed. `gap` is the mean distance of the engine's log-probs from the learner's of the same weights, in nats per
token; `lag` the mean over trained tokens. Target: with INT8 0.95 of the accuracy without, lag by lag.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.options import Verdict, end_on_sigterm, judge, make_parser, report
from research.quantization.cells import CELLS, measure

NUM_STEPS, NUM_QUICK_STEPS = 150, 8
TARGET = 0.95


def summarise(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per lag and kind: medians over the seeds, and the range of the accuracy."""
    found = []
    for lag, kind in sorted({(cell["max_lag"], cell["quantization"] or "") for cell in cells}):
        these = [cell for cell in cells if (cell["max_lag"], cell["quantization"] or "") == (lag, kind)]
        accuracies = [cell["accuracy"] for cell in these]
        found.append(
            {
                "max_lag": lag,
                "quantization": kind or "none",
                "accuracy": statistics.median(accuracies),
                "lowest": min(accuracies),
                "highest": max(accuracies),
                "lag": statistics.median(cell["lag"] for cell in these),
                "gap": statistics.median(cell["gap"] for cell in these),
            }
        )
    return found


def make_table(results: Mapping[str, Any]) -> str:
    """Return the rows of `summarise` as a table."""
    rows = results["summary"]
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        shown = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge the accuracy with INT8 by that without, lag by lag."""
    accuracy = {(row["max_lag"], row["quantization"]): row["accuracy"] for row in results["summary"]}
    ratios = {}
    for (lag, kind), value in accuracy.items():
        if kind != "none" and accuracy[lag, "none"]:
            ratios[f"accuracy at lag {lag}"] = value / (TARGET * accuracy[lag, "none"])
    return judge(ratios)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("research.quantization.study", __doc__, "one pair of cells, a few steps")
    given = parser.parse_args(arguments)
    end_on_sigterm()
    chosen, num_steps = (CELLS[:2], NUM_QUICK_STEPS) if given.quick else (CELLS, NUM_STEPS)
    cells = []
    for cell in chosen:
        cells.append(measure(cell, num_steps, lambda _: None))
        print(cells[-1], flush=True)
    return report(given, {"summary": summarise(cells), "cells": cells}, make_table, check)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
