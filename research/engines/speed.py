"""Speed of vLLM on a CPU by number format, and of adapters merged or served.

    python -m research.engines.speed [--quick] [--json FILE] [--check]

One random Qwen3; engines on one thread each take turns at the same batch, and what counts is processor time.
`merged` is how weight sync loads an adapter: into the model's weights, read anew from its files; `served` is
vLLM's own way, beside the model. Targets: INT8 and bfloat16 at least as fast as float32 while they sample,
and merged adapters at least as fast as served ones.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.options import Verdict, judge, make_parser, report
from research.engines.engine_process import EngineProcess, Kind, Request
from research.engines.models import make_prompts, save, save_factors

NUM_LAYERS, NUM_TOKENS = 6, 32
BATCHES, NUM_TURNS = (1, 32), 5
QUICK_BATCHES, NUM_QUICK_TURNS = (8,), 1
BASE = "float32"


def kinds_of(model: Path, adapter: Path, is_quick: bool) -> dict[str, Kind]:
    """Return the engines by name."""
    kinds = {
        BASE: Kind(model),
        "bfloat16": Kind(model, "bfloat16"),
        "int8 of float32": Kind(model, quantization="int8"),
        "int8 of bfloat16": Kind(model, "bfloat16", quantization="int8"),
        "single rows padded": Kind(model, pads_single_rows=True),
        "served adapter": Kind(model, adapter=adapter),
    }
    return {name: kinds[name] for name in (BASE, "served adapter")} if is_quick else kinds


def measure(is_quick: bool) -> dict[str, Any]:
    """Return medians of tokens per second by engine and batch, and seconds per version of an adapter."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = save(Path(scratch) / "model", "wide", NUM_LAYERS)
        adapter = save_factors(model, Path(scratch) / "adapter")
        kinds = kinds_of(model, adapter, is_quick)
        engines = {name: EngineProcess(kind) for name, kind in kinds.items()}
        try:
            return _measure(engines, adapter, is_quick)
        finally:
            for engine in engines.values():
                engine.close()


def _measure(engines: Mapping[str, EngineProcess], adapter: Path, is_quick: bool) -> dict[str, Any]:
    batches, num_turns = (QUICK_BATCHES, NUM_QUICK_TURNS) if is_quick else (BATCHES, NUM_TURNS)
    rows = [row for size in batches for row in _measure_batch(engines, size, num_turns)]
    versions: dict[str, list[float]] = {"merged": [], "served": []}
    for _ in range(num_turns + 1):
        versions["merged"].append(engines[BASE].merge(adapter))
        versions["served"].append(engines["served adapter"].serve(adapter))
    return {"speeds": rows, "version_s": {way: statistics.median(one[1:]) for way, one in versions.items()}}


def _measure_batch(
    engines: Mapping[str, EngineProcess], size: int, num_turns: int
) -> Iterator[dict[str, Any]]:
    """Yield the row of each engine; they take turns, and the first turn warms up."""
    prompts = make_prompts(size, seed=size)
    requests = [Request(prompt, NUM_TOKENS, seed) for seed, prompt in enumerate(prompts)]
    turns = [
        {name: engine.sample(requests)[1] for name, engine in engines.items()} for _ in range(num_turns + 1)
    ][1:]
    for name in engines:
        rate = size * NUM_TOKENS / statistics.median(turn[name] for turn in turns)
        ratio = statistics.median(turn[BASE] / turn[name] for turn in turns)
        yield {"engine": name, "batch": size, "tokens_per_s": rate, "of_float32": ratio}


def make_table(results: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    lines = ["| engine | requests at once | tokens/s | of float32 |", "|---|---|---|---|"]
    for row in results["speeds"]:
        speed, ratio = f"{row['tokens_per_s']:,.0f}", f"{row['of_float32']:.2f}"
        lines.append(f"| {row['engine']} | {row['batch']} | {speed} | {ratio} |")
    told = ", ".join(f"{way} {seconds:.3f} s" for way, seconds in results["version_s"].items())
    return "\n".join([*lines, f"a version of an adapter: {told}"])


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge each engine by float32; adapters that are served must not be faster."""
    ratios = {}
    for row in results["speeds"]:
        name = f"{row['engine']}, {row['batch']} at once"
        if row["engine"] == "served adapter":
            ratios[f"merged against {name}"] = 1 / row["of_float32"]
        elif row["engine"] not in (BASE, "single rows padded"):
            ratios[name] = row["of_float32"]
    return judge(ratios)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("research.engines.speed", __doc__, "two engines, one turn")
    given = parser.parse_args(arguments)
    return report(given, measure(given.quick), make_table, check)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
