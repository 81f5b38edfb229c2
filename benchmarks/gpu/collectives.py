"""Collectives between bare ranks, one for each GPU: bytes per second on the bus, and their sums.

Run: `python -m benchmarks.gpu.collectives`. NCCL between all GPUs (`--ranks` takes fewer); the bus rate is
that of nccl-tests: bytes x 2 (n - 1) / n of an all-reduce, (n - 1) / n of an all-gather, 1 of a broadcast.
`--quick` takes two ranks over gloo on a CPU. Not run on a GPU.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.frame import make_part_parser, name_device, run_part, time_turns
from benchmarks.harness.rows import Row
from learner.numerics.device import BACKENDS

GPU_BYTES, QUICK_BYTES = (1 << 20, 64 << 20, 1 << 30), (1 << 16,)
NUM_TURNS, TIMEOUT = 10, datetime.timedelta(seconds=60)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""By its name in torch 2.13, or the one before."""


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_part_parser("collectives", __doc__)
    parser.add_argument("--ranks", type=int, help="at most one for each GPU")
    given = parser.parse_args(arguments)
    num_ranks = 2 if given.quick else (given.ranks or torch.cuda.device_count())
    device = "cpu" if given.quick else "cuda"
    if num_ranks < 2 and not given.quick:
        print("collectives need two GPUs", file=sys.stderr)
        return 1
    return run_part(given, lambda: measure(device, num_ranks, QUICK_BYTES if given.quick else GPU_BYTES))


def measure(device: str, num_ranks: int, sizes: Sequence[int]) -> list[Row]:
    """Return a row per size."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        spawn(run_rank, (device, num_ranks, sizes, Path(name)), num_ranks)
        found: dict[str, dict[str, list[float]]] = json.loads(Path(name, "rates").read_text())
    case: dict[str, str | int | float] = {"ranks": num_ranks}
    case["device"] = name_device() if device == "cuda" else "CPU"
    return [
        Row.of("gpu.collectives", case | {"num_bytes": int(size)}, rates) for size, rates in found.items()
    ]


def run_rank(rank: int, device: str, num_ranks: int, sizes: Sequence[int], folder: Path) -> None:
    """Entry of one rank; the first writes what it measured."""
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(
        BACKENDS[device], init_method=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT
    )
    try:
        rates = {size: measure_size(size // 4, rank, num_ranks, place) for size in sizes}
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (folder / "rates").write_text(json.dumps(rates))


def measure_size(count: int, rank: int, num_ranks: int, place: torch.device) -> dict[str, list[float]]:
    """Return the bus rate of each collective over `count` float32 numbers; raise if a sum is wrong."""
    values = torch.full((count,), float(rank + 1), device=place)
    share, whole = values[: count // num_ranks].clone(), torch.empty_like(values)
    _all_gather(whole[: share.numel() * num_ranks], share)
    assert float(whole[share.numel()]) == 2.0, "the second rank's part has its values"
    dist.all_reduce(values)
    assert float(values[-1]) == num_ranks * (num_ranks + 1) / 2, "the sum over ranks"
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all_reduce": (2 * (num_ranks - 1) / num_ranks, lambda: dist.all_reduce(values)),
        "all_gather": (
            (num_ranks - 1) / num_ranks,
            lambda: _all_gather(whole[: share.numel() * num_ranks], share),
        ),
        "broadcast": (1.0, lambda: dist.broadcast(values, 0)),
    }
    return {
        f"{name}_bytes_per_s": [4 * count * factor / taken_s for taken_s in time_turns(call, NUM_TURNS)]
        for name, (factor, call) in calls.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
