"""Frame of a GPU measurement: its flags, its device, its clock and its table.

Invariant: without `--quick` it measures on a GPU or not at all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness.options import Verdict, make_parser, report
from benchmarks.harness.rows import Row

NO_GPU = "no GPU here; --quick checks this benchmark's logic on a CPU"
NOT_JUDGED: Verdict = (True, "nothing is judged")


def make_part_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `benchmarks.gpu.<name>`."""
    return make_parser(f"benchmarks.gpu.{name}", description, quick="tiny sizes, on any machine")


def run_part(
    given: argparse.Namespace,
    measure: Callable[[], list[Row]],
    check: Callable[[Sequence[Row]], Verdict] = lambda rows: NOT_JUDGED,
) -> int:
    """Measure, print and write the rows, judge them for --check; return the exit code."""
    if not given.quick and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    rows = measure()
    return report(given, {}, lambda _: table(rows), lambda _: check(rows), rows)


def find_device() -> torch.device:
    """Return the GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def name_device() -> str:
    """Return the GPU's name, if there is one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def time_call(call: Callable[[], object]) -> float:
    """Return the seconds of a call, with what it has the GPU do."""
    _wait()
    began = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - began


def time_turns(call: Callable[[], object], num_turns: int, num_warm_up: int = 1) -> list[float]:
    """Return the seconds of each of `num_turns` calls, after those that warm up."""
    return [time_call(call) for _ in range(num_warm_up + num_turns)][num_warm_up:]


def measure_peak(call: Callable[[], object]) -> int:
    """Return the most bytes of the GPU above those held before the call; 0 on a CPU."""
    if not torch.cuda.is_available():
        call()
        return 0
    _wait()
    torch.cuda.reset_peak_memory_stats()
    held_bytes = torch.cuda.memory_allocated()
    call()
    _wait()
    return torch.cuda.max_memory_allocated() - held_bytes


def table(rows: Sequence[Row]) -> str:
    """Return a line per row: its case, then its values, those of no row left out."""
    cases = list(dict.fromkeys(name for row in rows for name in row.case))
    values = list(dict.fromkeys(name for row in rows for name in row.values))
    lines = [f"| {' | '.join([*cases, *values])} |", "|---" * (len(cases) + len(values)) + "|"]
    for row in rows:
        cells = [str(row.case.get(name, "")) for name in cases]
        cells += [f"{row.values[name]:.4g}" if name in row.values else "" for name in values]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
