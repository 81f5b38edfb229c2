"""Memory of this machine: host, shared memory, GPUs.

Owns the places where it is read. Must never reserve any. An unknown size is None, and limits nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from asyncrl.control.machine.resources import count_gpus
from asyncrl.planner.plan.footprint.shared_memory import SHM_DIR

MEMORY_FILE = Path("/proc/meminfo")
LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Memory limits of a container, in the two versions of control groups."""
ASK_GPUS = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
ASK_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Capacity:
    """Memory of the machine, in bytes; None where a size is not known.

    Attributes:
        host: Main memory, or what a container may take of it.
        shm: Size of `/dev/shm`.
        gpu: Memory of the smallest GPU.
    """

    host: int | None = None
    shm: int | None = None
    gpu: int | None = None


@lru_cache
def measure() -> Capacity:
    """Return what this machine has."""
    return Capacity(_host_bytes(), _shm_bytes(), _gpu_bytes())


def _host_bytes() -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read(MEMORY_FILE), re.MULTILINE)
    limits = [int(text) for file in LIMIT_FILES if (text := _read(file).strip()).isdigit()]
    known = [*limits, *([int(found[1]) * 1024] if found else [])]
    return min(known, default=None)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _shm_bytes() -> int | None:
    try:
        stats = os.statvfs(SHM_DIR)
    except OSError:
        return None
    return stats.f_blocks * stats.f_frsize


def _gpu_bytes() -> int | None:
    if not count_gpus():
        return None
    try:
        told = subprocess.run(ASK_GPUS, capture_output=True, text=True, timeout=ASK_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(word) for word in told.stdout.split() if word.isdigit()]
    return min(sizes, default=0) * 1024**2 or None
