"""Rows: the one form in which every benchmark keeps what it measured.

Owns the form, its file and its validation. A file is written whole or not at all, and what was written is
what is read. A file says where and with what it was measured; a row says what was measured (`case`), the
medians (`values`), how much they swing (`spread`), over how many samples (`counts`), and the seed.

    row = Row.of("pipeline", {"max_lag": 4}, {"step_s": [0.2, 0.21, 0.19]})
    file = RowFile.taken_here("pipeline --quick", [row])
    file.write(path); RowFile.read(path) == file
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from asyncrl.core.errors import DataError
from benchmarks.harness.machine import describe_hardware, describe_versions

FORMAT = 1
Case = Mapping[str, str | int | float]
"""Parameters of a measurement, by name; two rows with the same benchmark and case can be compared."""


@dataclass(frozen=True)
class Row:
    """One case of a benchmark.

    Attributes:
        values: Medians (or single figures), with their unit in the name.
        spread: Of those that were measured several times: half the way from the 10th to the 90th percentile,
            in the same unit.
        counts: The number of samples behind each spread; absent where it is not known.
    """

    bench: str
    case: dict[str, str | int | float]
    values: dict[str, float]
    spread: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, bench: str, case: Case, samples: Mapping[str, float | Sequence[float]], seed: int = 0) -> Row:
        """Return the row of samples by name: of several the median and spread, a single one as it is."""
        several = {name: _as_samples(given) for name, given in samples.items()}
        values = {name: statistics.median(found) for name, found in several.items()}
        spread = {name: spread_of(found) for name, found in several.items() if len(found) > 1}
        counts = {name: len(several[name]) for name in spread}
        return cls(bench, dict(case), values, spread, seed, counts)

    def is_of(self, where: Mapping[str, str]) -> bool:
        """Tell whether the case has all these, given as text; numbers are compared as numbers.

        >>> Row("pipeline", {"sigma": 1.0}, {}).is_of({"sigma": "1"})
        True
        """
        return all(name in self.case and _is_same(self.case[name], text) for name, text in where.items())

    def with_samples(self, name: str, samples: Sequence[float]) -> Row:
        """Return the row with the median of `samples` as `name`, and of several their spread and number."""
        added = Row.of(self.bench, {}, {name: samples})
        spread = {known: value for known, value in self.spread.items() if known != name}
        counts = {known: value for known, value in self.counts.items() if known != name}
        return replace(
            self,
            values=self.values | added.values,
            spread=spread | added.spread,
            counts=counts | added.counts,
        )


@dataclass(frozen=True)
class RowFile:
    """The rows of one command, and where they come from.

    Attributes:
        taken: ISO 8601, in UTC.
        figures: The benchmark's own figures beyond its rows: every sample.
    """

    hardware: dict[str, str | int]
    versions: dict[str, str]
    taken: str
    command: str
    rows: tuple[Row, ...]
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def taken_here(
        cls, command: str, rows: Iterable[Row], figures: Mapping[str, Any] | None = None
    ) -> RowFile:
        """Return the file of what was measured on this machine at this moment."""
        taken = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(describe_hardware(), describe_versions(), taken, command, tuple(rows), dict(figures or {}))

    def write(self, path: Path) -> None:
        """Put the file in place of `path`, whole or not at all.

        Raises:
            DataError: A value is not a finite number, or the folder cannot be written; nothing is written.
        """
        body = {"format": FORMAT, **asdict(self), "rows": [asdict(row) for row in self.rows]}
        parse(body, str(path))
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise unwritable(path, error) from error
        finally:
            _remove(partial)

    @classmethod
    def read(cls, path: Path) -> RowFile:
        """Return what `path` holds.

        Raises:
            DataError: It is not there, no JSON, of another format, or a row is not as it should be.
        """
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read: {error}", hint="Give a file that --json wrote"
            ) from error
        return parse(body, str(path))


def unwritable(path: Path, error: OSError) -> DataError:
    """Return what to raise of a file that could not be written."""
    return DataError(
        f"{path} cannot be written: {error.strerror or error}", hint="Give a file in a folder that can be"
    )


def spread_of(samples: Sequence[float]) -> float:
    """Return half the way from the 10th to the 90th percentile of at least two samples.

    >>> round(spread_of([1.0, 2.0, 3.0]), 9)
    0.8
    """
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / 2


def parse(body: object, where: str) -> RowFile:
    """Return the file that a JSON value describes.

    Raises:
        DataError: It does not; the message names the field.
    """
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DataError(f"{where} is not a file of benchmark rows of format {FORMAT}")
    try:
        rows = tuple(Row(**row) for row in body["rows"])
        parts = {name: body[name] for name in ("hardware", "versions", "taken", "command")}
    except (KeyError, TypeError) as error:
        raise DataError(f"{where}: {error}") from error
    parts["figures"] = body.get("figures", {})
    _check_types(parts, ("hardware", "versions", "figures"), dict, where)
    _check_types(parts, ("taken", "command"), str, where)
    for number, row in enumerate(rows):
        _check(row, f"{where}: row {number}")
    return RowFile(rows=rows, **parts)


def _check_types(given: Mapping[str, object], names: Iterable[str], wanted: type, where: str) -> None:
    """Raise DataError for the first that is of another type: text, or a mapping."""
    for name in names:
        if not isinstance(given[name], wanted):
            what = "text" if wanted is str else "a mapping"
            raise DataError(f"{where}: `{name}` is not {what} but {given[name]!r}")


def _check(row: Row, where: str) -> None:
    _check_types(vars(row), ("case", "values", "spread", "counts"), dict, where)
    if not isinstance(row.bench, str) or not row.bench:
        raise DataError(f"{where}: `bench` is not a name")
    if not isinstance(row.seed, int):
        raise DataError(f"{where}: `seed` is not a whole number")
    for name, value in row.case.items():
        if not isinstance(value, str | int | float):
            raise DataError(f"{where}: case `{name}` is neither text nor a number")
    for name, value in [*row.values.items(), *row.spread.items()]:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"{where}: `{name}` is not a finite number but {value!r}")
    unknown = row.spread.keys() - row.values.keys()
    if unknown:
        raise DataError(f"{where}: a spread without a value: {', '.join(sorted(unknown))}")
    for name, count in row.counts.items():
        if name not in row.spread or not isinstance(count, int) or count < 2:
            raise DataError(f"{where}: count of `{name}` is not that of a spread: {count!r}")


def _is_same(value: str | int | float, text: str) -> bool:
    if isinstance(value, str):
        return value == text
    try:
        return float(text) == value
    except ValueError:
        return str(value) == text  # of a truth value


def _remove(path: Path) -> None:
    """Remove a file if it is there and its folder can be written."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _as_samples(given: float | Sequence[float]) -> list[float]:
    return [float(given)] if isinstance(given, int | float) else [float(value) for value in given]
