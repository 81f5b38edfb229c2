"""Memory of a learner rank and its node, in GiB."""

from __future__ import annotations

import psutil
import torch

_GIB = 2**30


def measure_memory() -> dict[str, float]:
    """Return `perf/*memory*` of this process; the GPU's where there is one."""
    found = {
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / _GIB,
        "perf/process_memory_gb": psutil.Process().memory_info().rss / _GIB,
    }
    if torch.cuda.is_available():
        found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / _GIB
        found["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / _GIB
    return found
