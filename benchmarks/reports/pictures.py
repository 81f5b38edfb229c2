"""`asyncrl bench plot FILE [PNG] [--values A,B] [--where NAME=VALUE,…]`: draws a file of rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.core.errors import DataError
from benchmarks.harness.options import writable
from benchmarks.harness.rows import Row, RowFile
from benchmarks.reports.plots import draw


def main(arguments: Sequence[str]) -> int:
    """Draw as the command line says, print where, and return the exit code."""
    parser = argparse.ArgumentParser(prog="asyncrl bench plot", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="that --json wrote")
    parser.add_argument("picture", type=writable, nargs="?", metavar="PNG", help="else FILE with .png")
    parser.add_argument("--values", type=_read_names, default=(), metavar="A,B", help="these alone")
    parser.add_argument(
        "--where", type=_read_where, default={}, metavar="NAME=VALUE,…", help="rows of such cases"
    )
    given = parser.parse_args(arguments)
    target = given.picture or given.file.with_suffix(".png")
    rows = select(RowFile.read(given.file).rows, given.values, given.where)
    for sentence in draw(rows, target):
        print(f"{sentence}: choose with --values and --where", file=sys.stderr)
    print(target)
    return 0


def select(rows: Sequence[Row], values: Sequence[str], where: Mapping[str, str]) -> list[Row]:
    """Return the rows of the cases asked for, with only the values asked for; none of them means all.

    Raises:
        DataError: There are none.
    """
    of_cases = [row for row in rows if row.is_of(where)]
    found = [row for row in (_with_only(values or tuple(row.values), row) for row in of_cases) if row.values]
    if not found:
        raise DataError("no row has such a case and such values", hint="Look into the file for their names")
    return found


def _with_only(names: Sequence[str], row: Row) -> Row:
    return replace(
        row,
        values={name: value for name, value in row.values.items() if name in names},
        spread={name: spread for name, spread in row.spread.items() if name in names},
        counts={name: count for name, count in row.counts.items() if name in names},
    )


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _read_where(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form NAME=VALUE,NAME=VALUE")
    return {name: value for name, _, value in pairs}
