"""`asyncrl bench all`: the benchmarks of the parts, one after another, their rows in one file.

Owns the order and the time: with `--quick` what would begin after three and a half minutes is left out, and
said so last, so that all ends within five. Each benchmark is a process of its own; one that fails or is over
its time does not end the others. Invariant: two of them never run at once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cli.commands.bench import BENCHMARKS
from asyncrl.core.errors import DataError
from benchmarks.harness.children import GRACE_S, run_child
from benchmarks.harness.options import command_of, end_on_sigterm, writable
from benchmarks.harness.rows import Row, RowFile

QUICK = tuple(name for name, one in BENCHMARKS.items() if one.in_all == "quick")
"""230 s together on two idle cores."""
FULL = tuple(name for name, one in BENCHMARKS.items() if one.in_all in ("quick", "whole"))
LEFT_OUT = tuple(name for name, one in BENCHMARKS.items() if one.in_all == "never")
"""Never run by `all`: they give rates, take hours, need a GPU, or have pages of their own."""
QUICK_S, FULL_S = 300.0, 4 * 3600.0
CLOSING_S = 5.0
"""At the end of all: the table, the rows with what they ran on, and the picture."""
RESERVE_S = 60.0
"""Of one quick benchmark: none begins that would have less before it is asked to end."""

Runner = Callable[[Sequence[str], float], "tuple[int, str]"]
"""(arguments of `asyncrl bench`, seconds at most) -> (exit code, what it printed)."""


@dataclass(frozen=True)
class Result:
    """Result of one benchmark.

    Attributes:
        verdict: Its last line: the worst ratio to a target, or the reason why there is none.
        rows: Its measured rows; none if it failed.
        is_left_out: It was not started, for lack of time.
    """

    name: str
    seconds: float
    code: int
    verdict: str
    rows: tuple[Row, ...]
    is_left_out: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run as the command line says.

    Return 1 if a benchmark failed or, with --check, missed a target or was left out.
    """
    given = _read_arguments(arguments)
    end_on_sigterm()  # the benchmark that runs must not outlive this
    names = given.only.split(",") if given.only else (QUICK if given.quick else FULL)
    results = run_all(names, given.quick, run_alone, lambda line: print(line, file=sys.stderr, flush=True))
    print(table(results))
    rows = [row for result in results for row in result.rows]
    if given.json is not None:
        verdicts = {result.name: {"code": result.code, "verdict": result.verdict} for result in results}
        file = RowFile.taken_here(command_of("all", arguments), rows, {"verdicts": verdicts})
        file.write(given.json)
    if given.plot is not None:
        from benchmarks.reports.plots import draw

        for sentence in draw(rows, given.plot):
            print(sentence, file=sys.stderr)
    return int(any(is_failure(result, is_checked=given.check) for result in results))


def is_failure(result: Result, *, is_checked: bool) -> bool:
    """Tell whether a benchmark gave nothing or, where targets are checked, missed one or was left out."""
    if result.is_left_out:
        return is_checked
    return not result.rows or (is_checked and bool(result.code))


def _read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="asyncrl bench all", description=f"{__doc__}\nNever run: {', '.join(LEFT_OUT)}."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="the short forms: at most five minutes")
    parser.add_argument("--only", metavar="NAME,…", help="these alone")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write all rows there")
    parser.add_argument("--plot", type=writable, metavar="FILE", help="draw them there, as a PNG")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a figure misses its target or was left out"
    )
    return parser.parse_args(arguments)


def run_all(
    names: Sequence[str],
    quick: bool,
    run: Runner,
    say: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
) -> list[Result]:
    """Run the benchmarks one after another while there is time; all end within `QUICK_S` or `FULL_S`."""
    limit_s = QUICK_S if quick else FULL_S
    end = now() + limit_s - GRACE_S - CLOSING_S
    results = []
    for name in names:
        began = now()
        if end - began < RESERVE_S:
            late = f"left out: {limit_s:g} s are nearly over"
            results.append(Result(name, 0.0, 0, late, (), is_left_out=True))
            continue
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
            file = Path(folder) / "rows.json"
            flags = ["--quick"] if quick else []
            code, output = run([name, *flags, "--json", str(file), "--check"], end - began)
            results.append(_read_result(name, now() - began, code, output, file))
        say(f"{name}: {results[-1].seconds:.0f} s, {results[-1].verdict}")
    return results


def run_alone(arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Run `asyncrl bench` in a session of its own; what it says goes to stderr.

    One that is over its time, or interrupted with this process, is asked to end, so that it leaves nothing
    behind, and ended with all of its session if it does not.
    """
    ended = run_child([sys.executable, "-m", "asyncrl.cli", "bench", *arguments], limit_s)
    return (1, f"did not end within {limit_s:.0f} s") if ended.is_late else (ended.code, ended.output)


def table(results: Sequence[Result]) -> str:
    """Return a line per benchmark, the time of all, and last what was not measured."""
    lines = ["| benchmark | seconds | rows | verdict |", "|---|---|---|---|"]
    for result in results:
        lines.append(f"| {result.name} | {result.seconds:.0f} | {len(result.rows)} | {result.verdict} |")
    lines += ["", f"{sum(result.seconds for result in results):.0f} s in all"]
    missing = [
        f"{result.name} ({'no time' if result.is_left_out else 'failed'})"
        for result in results
        if not result.rows
    ]
    return "\n".join([*lines, f"not measured: {', '.join(missing)}"] if missing else lines)


def _read_result(name: str, seconds: float, code: int, output: str, file: Path) -> Result:
    last = output.strip().splitlines()[-1] if output.strip() else f"exit code {code}, nothing printed"
    try:
        rows = RowFile.read(file).rows
    except DataError:
        return Result(name, seconds, code or 1, f"failed: {last}", ())
    return Result(name, seconds, code, last, rows)
