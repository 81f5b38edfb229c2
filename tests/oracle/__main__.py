"""Run every case of a vector set: `python -m tests.oracle PREFIX` (reads PREFIX.json and PREFIX.npz).

Prints per function how many cases passed and the worst error; exits with 1 if one missed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from tests.oracle.families import run_case
from tests.oracle.vectors import read_cases

MAX_SHOWN = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("prefix", type=Path, help="path without .json and .npz")
    cases = read_cases(parser.parse_args().prefix)
    total: dict[str, int] = defaultdict(int)
    passed: dict[str, int] = defaultdict(int)
    worst: dict[str, float] = defaultdict(float)
    missed: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        total[case.function] += 1
        try:
            misses, error = run_case(case)
        except Exception as problem:  # one broken case must not hide the others; it counts as a miss
            misses, error = [f"{type(problem).__name__}: {problem}"], 0.0
        passed[case.function] += not misses
        worst[case.function] = max(worst[case.function], error if not misses else 0.0)
        if misses:
            missed[case.function].append(f"{case.name}: {', '.join(misses)}")
    for function, count in total.items():
        print(f"{function:28s} {passed[function]}/{count}  worst error {worst[function]:.2e}")
        for line in missed[function][:MAX_SHOWN]:
            print(f"    missed {line}")
    num_passed = sum(passed.values())
    print(f"{num_passed} of {len(cases)} cases passed")
    return 0 if num_passed == len(cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
