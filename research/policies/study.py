"""Cost of each staleness policy: the real ledger in a queueing model, beside published rules.

Log-normal lengths (sigma 0.5, 1.2, 1.8) x `max_lag` (1, 2, 4, 8) x slots for 1.5 and 3 batches in flight x
our `mask`, `drop`, `wait` and the rules of AReaL, prime-rl and verl V1's `wait`, over the same lengths.
`--quick` takes sigma 1.2 and `max_lag` 4 and 8. Definitions of the words: `research.policies.tally`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import asyncrl
from benchmarks.harness.options import Verdict, judge, make_parser, report
from research.policies.experiment import GENERATION_LOAD, RULES, Cell, Sizes, run_cell

SIGMAS, MAX_LAGS, BATCHES_IN_FLIGHT = (0.5, 1.2, 1.8), (1, 2, 4, 8), (1.5, 3.0)
QUICK_SIGMAS, QUICK_MAX_LAGS = (1.2,), (4, 8)
QUICK_SIZES = Sizes(num_seeds=1)

OURS, KEEPING = ("mask", "drop", "wait"), ("prime_rl", "blocking")
LABELS = {
    "mask": "**mask**",
    "drop": "**drop**",
    "wait": "**wait**",
    "areal": "AReaL",
    "prime_rl": "prime-rl",
    "blocking": "blocking",
}
COLUMNS = {
    "violations": ("Trained tokens over the bound", "{:.1%}"),
    "idle": ("Learner idle", "{:.1%}"),
    "share": ("Generated tokens that train within the bound", "{:.1%}"),
    "length_bias": ("Length bias: mean length trained / begun", "{:.2f}"),
    "mean_lag": ("Mean lag of trained tokens, in steps", "{:.2f}"),
    "pace": (
        "In-bound tokens trained per unit of time, of what a learner that never waits could train",
        "{:.1%}",
    ),
}
MOST_BIAS, MOST_EXTRA_IDLE, LAG_SHARES = 0.01, 0.01, {4: 0.75, 8: 0.4}
LARGEST_RATIO = 99.0
"""Value of a ratio where a figure is perfect."""


def main(arguments: Sequence[str]) -> int:
    """Simulate as the command line says and return the exit code."""
    parser = make_parser(
        "python -m research.policies.study",
        __doc__,
        "sigma 1.2, max_lag 4 and 8, one seed: under a minute",
    )
    given = parser.parse_args(arguments)
    return report(given, measure(given.quick, given.json), table, check)


def measure(quick: bool, kept_at: Path | None = None) -> dict[str, Any]:
    """Simulate every cell and return all figures.

    Args:
        kept_at: Where the figures are kept cell by cell; a broken-off measurement of the same code and
            sizes goes on from there.
    """
    sizes = QUICK_SIZES if quick else Sizes()
    results: dict[str, Any] = {
        "benchmark": "staleness_policies",
        "quick": quick,
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "sizes": dataclasses.asdict(sizes),
        "generation_load": GENERATION_LOAD,
        "code": digest_code(),
    }
    found = _load_cells(kept_at, results)
    cells = select_cells(quick)
    for number, cell in enumerate(cells, 1):
        if cell.name not in found:
            found[cell.name] = describe(cell) | run_cell(cell, sizes).as_values()
            if kept_at is not None:
                kept_at.write_text(json.dumps(results | {"cells": found}))
        if number % len(RULES) == 0:
            print(f"{number} of {len(cells)} cells", file=sys.stderr)
    return results | {"cells": found}


def _load_cells(path: Path | None, described: Mapping[str, Any]) -> dict[str, Any]:
    kept = json.loads(path.read_text()) if path is not None and path.exists() else {}
    kept = kept.get("figures", kept)  # a file that was finished holds its cells beside the rows
    is_same = all(kept.get(name) == value for name, value in described.items())
    return dict(kept["cells"]) if is_same else {}


def digest_code() -> str:
    """Return a digest of the code that the figures depend on: the ledger and the simulation."""
    root = Path(asyncrl.__file__).parent
    folders = ("buffer/ledger", "planner/studies")
    files = [root / "core" / "staleness.py", *(path for one in folders for path in root.glob(f"{one}/*.py"))]
    parts = b"".join(path.name.encode() + path.read_bytes() for path in sorted(files))
    return hashlib.sha256(parts).hexdigest()[:16]


def select_cells(quick: bool) -> list[Cell]:
    """Return the cells, all rules of one setting after the other."""
    sigmas, max_lags = (QUICK_SIGMAS, QUICK_MAX_LAGS) if quick else (SIGMAS, MAX_LAGS)
    return [
        Cell(rule, sigma, max_lag, in_flight)
        for in_flight in BATCHES_IN_FLIGHT
        for sigma in sigmas
        for max_lag in max_lags
        for rule in RULES
    ]


def describe(cell: Cell) -> dict[str, Any]:
    """Return what a cell is, as it stands in the results."""
    return dataclasses.asdict(cell) | {"mean_steps": cell.mean_steps, "least_lag": cell.least_lag}


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as Markdown: a table per figure, a column per sigma and bound."""
    cells = list(results["cells"].values())
    parts = [_table_of(name, cells) for name in COLUMNS]
    return "\n\n".join([*parts, _least_lags(cells)])


def _table_of(name: str, cells: Sequence[Mapping[str, Any]]) -> str:
    title, form = COLUMNS[name]
    columns = _columns(cells)
    lines = [
        f"### {title}",
        "",
        _row(["slots", "rule", *map(_heading, columns)]),
    ]
    lines.append(_row(["---"] * (len(columns) + 2)))
    for in_flight in dict.fromkeys(cell["batches_in_flight"] for cell in cells):
        for rule in RULES:
            values = [_find(cells, rule, sigma, lag, in_flight)[name] for sigma, lag in columns]
            lines.append(_row([f"{in_flight:g} B", LABELS[rule], *map(form.format, values)]))
    return "\n".join(lines)


def _least_lags(cells: Sequence[Mapping[str, Any]]) -> str:
    columns = _columns(cells)
    lines = ["### The least mean lag that any rule can have that trains every group", ""]
    lines += [_row(["slots", *map(_heading, columns)])]
    lines.append(_row(["---"] * (len(columns) + 1)))
    for in_flight in dict.fromkeys(cell["batches_in_flight"] for cell in cells):
        values = [_find(cells, "mask", sigma, lag, in_flight)["least_lag"] for sigma, lag in columns]
        lines.append(_row([f"{in_flight:g} B", *(f"{value:.2f}" for value in values)]))
    return "\n".join(lines)


def _columns(cells: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    return list(dict.fromkeys((cell["sigma"], cell["max_lag"]) for cell in cells))


def _heading(column: tuple[float, int]) -> str:
    sigma, max_lag = column
    return f"\u03c3 {sigma:g}, \u03b7 {max_lag}"


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def _find(
    cells: Sequence[Mapping[str, Any]], rule: str, sigma: float, max_lag: int, in_flight: float
) -> Mapping[str, Any]:
    setting = (rule, sigma, max_lag, in_flight)
    return next(
        cell
        for cell in cells
        if (cell["rule"], cell["sigma"], cell["max_lag"], cell["batches_in_flight"]) == setting
    )


def check(results: Mapping[str, Any]) -> Verdict:
    """Return whether every target is met, and the worst ratio to a target as a sentence."""
    by_setting: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for cell in results["cells"].values():
        setting = (cell["sigma"], cell["max_lag"], cell["batches_in_flight"])
        by_setting.setdefault(setting, {})[cell["rule"]] = cell
    ratios: dict[str, float] = {}
    for (sigma, max_lag, in_flight), rules in by_setting.items():
        where = f"sigma {sigma:g}, max_lag {max_lag}, {in_flight:g} batches in flight"
        ratios |= {f"{what}; {where}": ratio for what, ratio in _ratios(rules, sigma, max_lag).items()}
    return judge(ratios)


def _ratios(rules: Mapping[str, Mapping[str, Any]], sigma: float, max_lag: int) -> dict[str, float]:
    """Return the ratios of one setting, by target."""
    mask = rules["mask"]
    ratios = {f"no violation of {name}": float(rules[name]["violations"] == 0) for name in OURS}
    ratios["length bias of mask"] = _at_most(abs(mask["length_bias"] - 1), MOST_BIAS)
    ratios["idle over AReaL's"] = _at_most(mask["idle"] - rules["areal"]["idle"], MOST_EXTRA_IDLE)
    if sigma <= 1.2 and max_lag >= 4:
        # Blocking wastes no token, so no share is larger: there the pace is compared.
        ratios["share over prime-rl's"] = mask["share"] / rules["prime_rl"]["share"]
        ratios |= {f"pace over {LABELS[name]}'s": mask["pace"] / rules[name]["pace"] for name in KEEPING}
    target = LAG_SHARES.get(max_lag, 1.0) * max_lag
    if mask["least_lag"] <= target:  # beyond it, the tokens are older when their group ends
        ratios["mean lag of mask"] = _at_most(mask["mean_lag"], target)
    return ratios


def _at_most(value: float, limit: float) -> float:
    return LARGEST_RATIO if value <= limit / LARGEST_RATIO else limit / value


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
