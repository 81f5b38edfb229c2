"""`asyncrl bench gpu`: all that a GPU machine can tell in 25 minutes, the most telling first.

Each part is a process in a session of its own, with its own time. The file of `--json` is written anew after
each part, so that a suite that is cut short leaves the rows of those before. What is missing here, and what
no longer fits into `--minutes`, is skipped by name. `--dry` runs every part with tiny sizes on the CPU and
checks that each works; `--quick` those of them that fit into a minute; neither judges a figure. Exits with 1
if a part fails, or with --check if one misses its target. benchmarks/gpu/README.md says how to carry it to a
machine without network. Invariant: two parts never run at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.core.errors import DataError
from benchmarks.gpu.frame import NO_GPU, table
from benchmarks.harness.children import run_child
from benchmarks.harness.options import end_on_sigterm, judge, make_parser, read_ratio
from benchmarks.harness.rows import Row, RowFile

MINUTES, DRY_MINUTES, QUICK_MINUTES = 25.0, 8.0, 0.8
"""Of all parts together; the quick form leaves the rest of a minute to its own start."""
LAST_LINES = 8
"""Of a part that failed."""
ROOT = Path(__file__).parents[2]
GPU, GPUS, PLUGIN = "a GPU", "two GPUs", "asyncrl's plug-in of vLLM"
MEGATRON = "megatron.core"
LARGE_HOST = "150 GB of main memory"
"""16 bytes for each of 8.2 G weights: `megatron` would have the optimizer on the GPU in an update."""


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        command: Module and arguments.
        gpu_s, dry_s: Time that it should take on an H100 (estimated: it has not run on one), and with tiny
            sizes on two cores (measured). It is ended after three times that and a minute.
        needs: Modules, or one of `GPU`, `GPUS`, `LARGE_HOST` and `PLUGIN`.
    """

    name: str
    command: tuple[str, ...]
    gpu_s: float
    dry_s: float
    needs: tuple[str, ...] = (GPU,)


def _learner(name: str, gpu_s: float, *arguments: str) -> Part:
    needs = (GPU, MEGATRON, "transformers")
    return Part(name, ("benchmarks.gpu.learner", *arguments), gpu_s, 12, needs)


PARTS = (
    Part("machine", ("benchmarks.gpu.machine",), 15, 4),
    _learner("learner_1.7B", 90, "--model", "1.7B"),
    Part("attention", ("benchmarks.gpu.attention",), 40, 5),
    Part("logprob", ("benchmarks.gpu.logprob",), 40, 4),
    Part("weight_sync", ("benchmarks.gpu.weight_sync",), 60, 5),
    Part("replay", ("benchmarks.gpu.exactness", "replay"), 90, 13, (GPU, MEGATRON, "transformers")),
    Part("gap", ("benchmarks.gpu.exactness", "gap"), 45, 13, (GPU, MEGATRON, "transformers")),
    Part("end_to_end", ("benchmarks.gpu.end_to_end",), 300, 110, (GPU, "vllm", "ray", PLUGIN)),
    Part("collectives", ("benchmarks.gpu.collectives",), 40, 7, (GPUS,)),
    Part("direct", ("benchmarks.weight_sync.direct",), 40, 9, (GPUS,)),
    _learner("learner_0.6B", 60, "--model", "0.6B"),
    Part(
        "checkpoints", ("benchmarks.learner.checkpoints", "--model", "0.6B"), 120, 15,
        (GPU, MEGATRON, "transformers"),
    ),
    _learner("learner_1.7B_fsdp2", 90, "--model", "1.7B", "--backend", "fsdp2", "--updates", "3"),
    _learner("learner_1.7B_offload", 60, "--model", "1.7B", "--offload", "--updates", "3"),
    _learner("learner_4B", 120, "--model", "4B", "--recompute", "full", "--updates", "3"),
    Part(
        "learner_8B_offload",
        ("benchmarks.gpu.learner", "--model", "8B", "--backend", "fsdp2", "--recompute", "full", "--offload",
         "--updates", "2"),
        240, 12, (GPU, LARGE_HOST, MEGATRON, "transformers"),
    ),
)  # fmt: skip
"""In the order in which they run."""


@dataclass(frozen=True)
class Result:
    """Result of one part: `state` is `measured`, `failed` or `skipped`, `told` says more in words."""

    name: str
    state: str
    told: str
    seconds: float = 0.0
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What parts need, by name: a reason for its absence, "" for what is there."""

    num_gpus: int
    host_bytes: int = 1 << 40

    def find_missing(self, part: Part) -> str:
        """Return why the part cannot run here, "" if it can."""
        return next(filter(None, map(self._explain, part.needs)), "")

    def _explain(self, need: str) -> str:
        if need == LARGE_HOST:
            return "" if self.host_bytes >= 150e9 else f"this machine does not have {need}"
        if need in (GPU, GPUS):
            return "" if self.num_gpus >= (2 if need == GPUS else 1) else f"this machine does not have {need}"
        return "" if (has_plugin() if need == PLUGIN else is_installed(need)) else f"{need} is not installed"


def is_installed(module: str) -> bool:
    """Tell whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def has_plugin() -> bool:
    """Tell whether vLLM's processes find asyncrl's plug-in: not in a checkout that is only on the path."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(point.value.startswith("rollout_service.") for point in found)


def main(arguments: Sequence[str]) -> int:
    """Run as the command line says and return the exit code."""
    given = _read_arguments(arguments)
    is_dry = given.dry or given.quick
    num_gpus = 2 if is_dry else _count_gpus()
    if not num_gpus:
        print(NO_GPU.replace("--quick", "--dry"), file=sys.stderr)
        return 1
    end_on_sigterm()  # the part that runs must not outlive this
    parts = [part for part in PARTS if part.name in given.only]
    results: list[Result] = []
    machine = Machine(num_gpus, 1 << 40 if is_dry else psutil.virtual_memory().total)
    for result in run_all(parts, machine, 60 * given.minutes, is_dry=is_dry):
        results.append(result)
        print(
            describe(result),
            *([] if is_dry or not result.rows else [table(result.rows)]),
            sep="\n",
            flush=True,
        )
        if given.json is not None:
            _write(given.json, given.command, results)
    return conclude(results, is_checked=given.check)


def _read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("asyncrl bench gpu", __doc__, quick="as --dry, the parts that fit into a minute")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dry", action="store_true", help="every part tiny, on the CPU: 8 minutes at most")
    parser.add_argument("--minutes", type=float, help=f"for all parts together; without it {MINUTES:g}")
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"these of {', '.join(part.name for part in PARTS)}"
    )
    given = parser.parse_args(arguments)
    names = {part.name for part in PARTS}
    given.only = given.only.split(",") if given.only else list(names)
    if unknown := set(given.only) - names:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    usual = QUICK_MINUTES if given.quick else DRY_MINUTES if given.dry else MINUTES
    given.minutes = given.minutes or usual
    return given


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()  # asks the driver; no memory of the GPU is taken


def run_all(
    parts: Sequence[Part],
    machine: Machine,
    limit_s: float,
    *,
    is_dry: bool,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:
    """Run the parts one after another, and yield each one's result as it ends."""
    end = now() + limit_s
    environment = make_environment(os.environ, is_dry=is_dry)
    for part in parts:
        should_s, left_s = part.dry_s if is_dry else part.gpu_s, end - now()
        missing = machine.find_missing(part)
        if not missing and should_s > left_s:
            missing = f"it takes about {should_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
        if missing:
            yield Result(part.name, "skipped", missing)
            continue
        yield run_one(part, "--quick" if is_dry else "--check", min(left_s, 3 * should_s + 60), environment)


def make_environment(environment: Mapping[str, str], *, is_dry: bool) -> dict[str, str]:
    """Return the environment of parts: they find the checkout, and in a dry run no GPU."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    found = {**environment, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if is_dry else {})


def run_one(part: Part, flag: str, limit_s: float, environment: Mapping[str, str]) -> Result:
    """Run one part, with --quick or --check; it is measured if it has written its rows."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", *part.command, flag, "--json", str(file)]
        ended = run_child(command, limit_s, environment, keeps_errors=True)
        seconds, lines = time.monotonic() - began, ended.output.strip().splitlines()
        try:
            rows = RowFile.read(file).rows
        except DataError:
            why = f"did not end within {limit_s:.0f} s" if ended.is_late else f"exit code {ended.code}"
            return Result(part.name, "failed", "\n".join([why, *lines[-LAST_LINES:]]), seconds)
    told = lines[-1] if flag == "--check" and lines else "it works; tiny sizes say nothing"
    return Result(part.name, "measured", told, seconds, rows)


def describe(result: Result) -> str:
    """Return the line of one part; of one that failed, also the last lines that it printed."""
    if result.state == "skipped":
        return f"{result.name}: skipped: {result.told}"
    first, *others = result.told.splitlines() or [""]
    indented = "".join(f"\n    {line}" for line in others)
    return f"{result.name}: {result.state} in {result.seconds:.0f} s: {first}{indented}"


def conclude(results: Sequence[Result], *, is_checked: bool) -> int:
    """Print the numbers of all, for --check the worst ratio last; return the exit code."""
    counts = {
        state: sum(one.state == state for one in results) for state in ("measured", "failed", "skipped")
    }
    seconds = sum(result.seconds for result in results)
    print(f"{', '.join(f'{count} {state}' for state, count in counts.items())} in {seconds:.0f} s")
    ratios = {
        f"{result.name}: {result.told.partition('(')[2].removesuffix(')')}": ratio
        for result in results
        if result.state == "measured" and (ratio := read_ratio(result.told)) is not None
    }
    is_met = True
    if is_checked and ratios:
        is_met, verdict = judge(ratios)
        print(verdict)
    return int(bool(counts["failed"]) or not is_met)


def _write(path: Path, command: str, results: Sequence[Result]) -> None:
    """Write the rows of all parts so far, and how each ended."""
    rows = [row for result in results for row in result.rows]
    parts = {result.name: {"state": result.state, "told": result.told} for result in results}
    RowFile.taken_here(command, rows, {"parts": parts}).write(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
