"""The flags that every benchmark has, and what they do with its figures.

Owns `--quick`, `--json` (a file of rows, see `rows`), `--check`, what of a command line is kept with
the rows, and how a verdict is worded: the worst ratio to a target stands last, and a ratio below 1 is a miss.
A file that cannot be written is refused before anything is measured.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.figures import make_rows
from benchmarks.harness.rows import Row, RowFile

Verdict = tuple[bool, str]
"""Whether every target is met, and the worst ratio to a target as a sentence."""

_WORST = "worst ratio to a target: "

TERMINATED = 143
"""Exit code."""


def end_on_sigterm() -> None:
    """Let SIGTERM end the program as an error would: runs, processes and folders are taken down on the way.

    Only the first: the ones after it would interrupt that.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(TERMINATED)

    signal.signal(signal.SIGTERM, end)


class _Parser(argparse.ArgumentParser):
    """Keeps the command line that it has read: `command` of what it returns."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        arguments = sys.argv[1:] if args is None else args
        given = super().parse_args(arguments, namespace)
        given.command = command_of(given.bench, arguments)
        return given


def make_parser(program: str, description: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the common flags; `quick` says what `--quick` leaves out."""
    parser = _Parser(prog=program, description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=writable, metavar="FILE", help="write rows and all figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its target")
    parser.set_defaults(bench=program.split()[-1].removeprefix("benchmarks."))
    return parser


def command_of(bench: str, arguments: Sequence[str]) -> str:
    """Return what is kept of a command line: all but where the figures go and whether they are judged.

    >>> command_of("weight_sync", ["--bucket-bytes", "4194304", "--json", "rows.json", "--check"])
    'weight_sync --bucket-bytes 4194304'
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--check", action="store_true")
    _, kept = parser.parse_known_args(list(arguments))
    return shlex.join([bench, *kept])


def writable(text: str) -> Path:
    """Return the path of a file that is to be written, as the type of an argument.

    Raises:
        ArgumentTypeError: Its folder is not there or cannot be written, or it is a folder itself.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written: there is no folder '{path.parent}'")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        what = "it is a folder" if path.is_dir() else f"'{path.parent}' may not be written"
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written: {what}")
    return path


def report(
    given: argparse.Namespace,
    results: Mapping[str, Any],
    table: Callable[[Any], str],
    check: Callable[[Any], Verdict],
    rows: Iterable[Row] | None = None,
) -> int:
    """Print the figures, write them where `--json` says, judge them for `--check`; return the exit code.

    Args:
        given: The parsed arguments of a `make_parser`.
        rows: Rows that `--json` writes beside all figures; by default they are made of the figures.
    """
    print(table(results))
    if given.json is not None:
        found = make_rows(given.bench, results) if rows is None else rows
        RowFile.taken_here(given.command, found, results).write(given.json)
    if not given.check:
        return 0
    is_met, verdict = check(results)
    print(verdict)
    return 0 if is_met else 1


def judge(ratios: Mapping[str, float]) -> Verdict:
    """Return the verdict on ratios by name, each at least 1 if its target is met."""
    name, worst = min(ratios.items(), key=lambda item: item[1])
    return worst >= 1, f"{_WORST}{worst:.2f} ({name})"


def read_ratio(verdict: str) -> float | None:
    """Return the ratio of a verdict of `judge`; None of any other text.

    >>> read_ratio(judge({"speed": 1.5})[1])
    1.5
    """
    number = verdict.removeprefix(_WORST).partition(" ")[0]
    return float(number) if verdict.startswith(_WORST) else None
