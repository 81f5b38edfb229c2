"""CPU time of a version's manifest, by its number of tensors: 36,000 are those of a large mixture of experts.

Of each process: made, written, read for the first time, read again as every later version of a run is, and
compared with the tensors of an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.core.staleness import PolicyVersion
from benchmarks.harness.options import Verdict, judge, make_parser, report
from weight_sync.memory import manifest as manifests
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, check_tensors, plan

NUM_TENSORS = (300, 36_000)
NUM_TURNS = 5
BUCKET_BYTES = 64 << 20
SHAPE = (2048, 768)
LIMIT_S = 0.050
"""Of every part with the most tensors."""


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("asyncrl bench manifests", __doc__, quick="nothing: it takes seconds")
    given = parser.parse_args(arguments)
    rows = [row for num_tensors in NUM_TENSORS for row in measure(num_tensors)]
    return report(given, {"benchmark": "manifests", "rows": rows}, table, check)


def measure(num_tensors: int) -> list[dict[str, Any]]:
    """Return a row per part: the least CPU seconds of `NUM_TURNS`."""
    names = [f"model.layers.{n // 384}.mlp.experts.{n % 384}.gate_proj.weight" for n in range(num_tensors)]
    specs = [TensorSpec(name, "bfloat16", SHAPE) for name in names]
    layout = plan(specs, BUCKET_BYTES)
    sizes = (min(BUCKET_BYTES, layout.total_bytes - at) for at in range(0, layout.total_bytes, BUCKET_BYTES))
    version = Manifest(PolicyVersion(2, 1), layout, tuple(Bucket(size, "0" * 32) for size in sizes))
    data, expected = version.to_bytes(), dict.fromkeys(names, SHAPE)
    dtypes = {name: {"bfloat16"} for name in names}

    def read_first() -> Manifest:
        manifests._read_layout.cache_clear()
        return Manifest.from_bytes(data)

    parts: dict[str, Callable[[], object]] = {
        "plan": lambda: plan(specs, BUCKET_BYTES),
        "write": version.to_bytes,
        "read first": read_first,
        "read again": lambda: Manifest.from_bytes(data),
        "compare": lambda: check_tensors(version, expected, dtypes),
    }
    return [
        {"num_tensors": num_tensors, "part": part, "cpu_s": min(_time(run) for _ in range(NUM_TURNS))}
        for part, run in parts.items()
    ]


def _time(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def table(results: dict[str, Any]) -> str:
    """Return the rows as text."""
    lines = [f"{'tensors':>8} {'':>10} {'CPU ms':>8}"]
    lines += [
        f"{row['num_tensors']:>8} {row['part']:>10} {row['cpu_s'] * 1e3:>8.2f}" for row in results["rows"]
    ]
    return "\n".join(lines)


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every part with the most tensors keeps `LIMIT_S`, and the worst one."""
    most = [row for row in results["rows"] if row["num_tensors"] == max(NUM_TENSORS)]
    return judge({f"{row['part']}, at most {LIMIT_S:g} s": LIMIT_S / max(1e-9, row["cpu_s"]) for row in most})
