"""The flags that every benchmark has, and what they do with its figures.

Owns `--quick`, `--json`, `--check`, and how a verdict is worded: the worst ratio to a target stands
last, and a ratio below 1 is a miss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Verdict = tuple[bool, str]
"""Whether every target is met, and the worst ratio to a target as a sentence."""


def make_parser(program: str, description: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the common flags; `quick` says what `--quick` leaves out."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure misses its target")
    return parser


def report(
    given: argparse.Namespace,
    results: Mapping[str, Any],
    table: Callable[[Any], str],
    check: Callable[[Any], Verdict],
) -> int:
    """Print the figures, write them where `--json` says, judge them for `--check`; return the exit code."""
    print(table(results))
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n")
    if not given.check:
        return 0
    is_met, verdict = check(results)
    print(verdict)
    return 0 if is_met else 1


def judge(ratios: Mapping[str, float]) -> Verdict:
    """Return the verdict on ratios by name, each at least 1 if its target is met."""
    name, worst = min(ratios.items(), key=lambda item: item[1])
    return worst >= 1, f"worst ratio to a target: {worst:.2f} ({name})"
