"""Cut a vector set down to what the tests carry: `python -m tests.oracle.subset PREFIX OUT`.

Keeps a few cases of every function and of every policy loss, spread evenly over the set, so
that each kind of batch (holes, empty rows, groups of one or without contrast) stays.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.vectors import NOT_OURS

PER_FUNCTION = 8
PER_LOSS = 2


def choose(cases: dict[str, Any]) -> list[str]:
    """Return the names that stay, spread evenly over each function's cases."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name, case in cases.items():
        if case["fn"] in NOT_OURS:
            continue
        by_kind[f"{case['fn']}/{case['in'].get('loss_mode', '')}"].append(name)
    chosen = []
    for kind, names in by_kind.items():
        limit = PER_FUNCTION if kind.endswith("/") else PER_LOSS
        step = max(1, len(names) / limit)
        chosen += [names[int(index * step)] for index in range(min(limit, len(names)))]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.subset", description=__doc__)
    parser.add_argument("prefix", type=Path)
    parser.add_argument("out", type=Path)
    paths = parser.parse_args()
    cases = json.loads(paths.prefix.with_name(paths.prefix.name + ".json").read_text())["cases"]
    kept = {name: cases[name] for name in choose(cases)}
    wanted = {
        value["array"]
        for case in kept.values()
        for value in [*case["in"].values(), *case["out"].values()]
        if isinstance(value, dict) and "array" in value
    }
    with np.load(paths.prefix.with_name(paths.prefix.name + ".npz"), allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in sorted(wanted)}
    paths.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"cases": kept}, separators=(",", ":"))
    paths.out.with_name(paths.out.name + ".json").write_text(text + "\n")
    np.savez_compressed(paths.out.with_name(paths.out.name + ".npz"), **arrays)
    print(f"{len(kept)} cases, {len(arrays)} arrays")


if __name__ == "__main__":
    main()
