"""Rows from a benchmark's own figures, whatever their shape.

Numbers are values and lists of numbers are samples; texts, and the numbers whose names are in
`CASE_NAMES`, name the measured case. A list of mappings is a row each; other mappings are followed, their
keys joined by `/`. Nothing else is guessed: a benchmark that knows its rows better makes them itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.harness.rows import Row

CASE_NAMES = frozenset(
    {
        "quick",
        "num_bytes",
        "bucket_bytes",
        "num_receivers",
        "num_parameters",
        "num_tensors",
        "vocab_size",
        "hidden_size",
        "max_lag",
        "replicas",
        "producers",
        "consumers",
        "tokens",
        "share",
        "learning_rate",
        "sigma",
        "batches_in_flight",
    }
)
SKIPPED = frozenset({"benchmark", "machine", "seed", "code"})
"""Names that the file or the row has a field for."""
MAX_TEXT_CHARS = 64
"""Of a text that says what was measured; a longer one is an explanation."""


def make_rows(bench: str, figures: Mapping[str, Any], case_names: Iterable[str] = ()) -> list[Row]:
    """Return the rows of `figures`; `case_names` are further numbers that say what was measured."""
    seed = figures.get("seed", 0)
    names = CASE_NAMES.union(case_names)
    rows = (
        Row.of(bench, case, samples, seed if isinstance(seed, int) else 0)
        for case, samples in _split(figures, names)
        if samples
    )
    return _numbered(rows)


def _split(
    figures: Mapping[str, Any], names: frozenset[str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the case and the samples of `figures` itself, then those of each mapping in its lists."""
    case: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    tables: list[tuple[str, list[Mapping[str, Any]]]] = []
    _sort(figures, "", names, case, samples, tables)
    yield case, samples
    for part, rows in tables:
        for row in rows:
            for inner_case, inner_samples in _split(row, names):
                yield {**case, "part": part, **inner_case}, inner_samples


def _sort(
    figures: Mapping[str, Any],
    prefix: str,
    names: frozenset[str],
    case: dict[str, Any],
    samples: dict[str, Any],
    tables: list[tuple[str, list[Mapping[str, Any]]]],
) -> None:
    """Put each entry of `figures` where it belongs."""
    for name, value in figures.items():
        path = f"{prefix}{name}"
        if name in SKIPPED or (isinstance(value, str) and len(value) > MAX_TEXT_CHARS):
            continue
        if isinstance(value, str) or (name in names and isinstance(value, int | float)):
            case[path] = value
        elif isinstance(value, Mapping):
            _sort(value, f"{path}/", names, case, samples, tables)
        elif _is_number(value) or _are_numbers(value):
            samples[path] = value
        elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            tables.append((path, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_number(entry) for entry in value)


def _numbered(rows: Iterable[Row]) -> list[Row]:
    """Give rows of the same case a number, so that each case stands once."""
    found: list[Row] = []
    seen: dict[str, int] = {}
    for row in rows:
        key = repr(sorted(row.case.items()))
        seen[key] = seen.get(key, 0) + 1
        case = row.case if seen[key] == 1 else {**row.case, "number": seen[key]}
        found.append(replace(row, case=case))
    return found
