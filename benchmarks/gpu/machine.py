"""Description of a GPU machine as torch sees it, and the rates that bound all others.

Run: `python -m benchmarks.gpu.machine`. The product of two square matrices, a copy within the GPU's memory,
and copies between host and GPU, pinned and not. `--quick` does the same with little data on a CPU. Not run
on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.frame import find_device, make_part_parser, name_device, run_part, time_turns
from benchmarks.harness.rows import Case, Row

GPU_SIZE, QUICK_SIZE = 8192, 256
GPU_BYTES, QUICK_BYTES = 1 << 30, 1 << 20
NUM_TURNS = 10


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    given = make_part_parser("machine", __doc__).parse_args(arguments)
    sizes = (QUICK_SIZE, QUICK_BYTES) if given.quick else (GPU_SIZE, GPU_BYTES)
    return run_part(given, lambda: [measure(*sizes)])


def measure(size: int, num_bytes: int) -> Row:
    """Return the machine's row; rates are in bytes of the copy, which a copy in memory moves twice."""
    device = find_device()
    square = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    there, other = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    plain, pinned = (
        torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        for is_pinned in (False, device.type == "cuda")
    )
    copies: dict[str, Callable[[], object]] = {
        "copy_in_memory": lambda: other.copy_(there),
        "to_gpu_pinned": lambda: there.copy_(pinned, non_blocking=True),
        "to_gpu": lambda: there.copy_(plain),
        "to_host_pinned": lambda: pinned.copy_(there, non_blocking=True),
        "to_host": lambda: plain.copy_(there),
    }
    product = [2 * size**3 / taken_s for taken_s in time_turns(lambda: square @ square, NUM_TURNS)]
    samples: dict[str, float | list[float]] = describe() | {
        f"{name}_bytes_per_s": [num_bytes / taken_s for taken_s in time_turns(copy, NUM_TURNS)]
        for name, copy in copies.items()
    }
    return Row.of("gpu.machine", name_versions(), samples | {"product_flops_per_s": product})


def name_versions() -> Case:
    """Return the device's name and the versions that come with torch."""
    found = {"device": name_device(), "torch": str(torch.__version__), "cuda": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        found["capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def describe() -> dict[str, float | list[float]]:
    """Return the number of GPUs, and of the first the memory, all of it and what is free."""
    if not torch.cuda.is_available():
        return {"gpus": 0.0}
    free, total = torch.cuda.mem_get_info()
    return {"gpus": torch.cuda.device_count(), "memory_bytes": total, "free_bytes": free}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
