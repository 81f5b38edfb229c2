"""The GPUs of this machine: those that processes see, driver, free memory, links, and the presets that fit.

What NVIDIA's management library (package `nvidia-ml-py`, which vLLM brings) does not say here is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from asyncrl.cli.doctor.finding import Finding, judge
from asyncrl.cli.doctor.packages import installed_version
from asyncrl.control.machine.resources import DRIVER_GPUS, count_gpus, visible_gpus
from asyncrl.core.config.load import load_config
from asyncrl.planner.plan.fit import Machine, find_fit
from asyncrl.planner.plan.footprint import capacity

DRIVER = Path("/proc/driver/nvidia/version")
RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
"""Packages whose version is that of the CUDA that torch was built for."""
OLDEST_DRIVER = {12: 525, 13: 580}
"""Of each major version of CUDA: NVIDIA's table of minor version compatibility."""
GIB = 1 << 30
MIN_FREE = 0.95
"""Share of a GPU's memory that must be free: an engine asks for 0.92 of all."""
MAX_LINKS = 18


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory in bytes; `num_links`: NVLinks that are up."""

    uuid: str
    name: str
    total: int
    free: int
    num_links: int


def check_gpus() -> Iterator[Finding]:
    """Yield what there is, and for each thing that a run would stumble over a remedy."""
    num_gpus = count_gpus()
    if not num_gpus:
        yield Finding("gpu", "ok", "none: runs use the CPU")
        return
    num_there = len(list(DRIVER_GPUS.iterdir()))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if num_gpus == num_there else f" of {num_there} (CUDA_VISIBLE_DEVICES={named})"
    visible = visible_gpus()
    gpus = {
        index: gpu
        for index, gpu in enumerate(_read_gpus())
        if visible is None or not {str(index), gpu.uuid}.isdisjoint(visible)
    }
    kinds = sorted({f"{gpu.name}, {gpu.total / GIB:.0f} GiB" for gpu in gpus.values()})
    yield Finding("gpu", "ok", f"{num_gpus}{hidden} NVIDIA GPUs{''.join(f'; {kind}' for kind in kinds)}")
    yield from _check_driver()
    taken = [
        f"{index} ({gpu.free / GIB:.0f} GiB free)"
        for index, gpu in gpus.items()
        if gpu.free < MIN_FREE * gpu.total
    ]
    found = f"others use GPU {', '.join(taken)}" if taken else "free"
    advice = "End what runs there ('nvidia-smi' names it), or hide these GPUs by CUDA_VISIBLE_DEVICES"
    if gpus:
        yield judge("gpu memory", found, not taken, advice)
    if len(gpus) > 1:
        are_linked = all(gpu.num_links for gpu in gpus.values())
        advice = "Ranks exchange over PCIe: prefer learner.dp to learner.tp, and small buckets of gradients"
        yield judge("nvlink", "between GPUs" if are_linked else "none", are_linked, advice)


def check_presets(machine: Machine | None = None) -> Iterator[Finding]:
    """Yield a line for each preset for GPUs, or one for all where there is no GPU.

    Args:
        machine: Taken for this one.
    """
    from configs import shipped

    there = machine or Machine(count_gpus(), capacity.measure())
    if not there.num_gpus:
        yield Finding("presets", "ok", "quickstart runs here; the presets for GPUs do not")
        return
    for name, path in shipped().items():
        config = load_config(path)
        if config.rollout.gpus:
            elsewhere = "; the others on other nodes" if config.launcher.is_cluster else ""
            yield Finding(f"preset {name}", "ok", f"{find_fit(config, there).tell()}{elsewhere}")


def _check_driver() -> Iterator[Finding]:
    runtime = next(filter(None, map(installed_version, RUNTIMES)), None)
    told = re.search(r"Kernel Module.*?\s(\d+)\.\d", DRIVER.read_text()) if DRIVER.is_file() else None
    if runtime is None or told is None:
        return
    cuda, driver = int(runtime.partition(".")[0]), int(told[1])
    oldest = OLDEST_DRIVER.get(cuda, max(OLDEST_DRIVER.values()))
    advice = f"CUDA {cuda} needs a driver from {oldest} on: renew it on the host (in a container too)"
    yield judge("driver", f"{driver}, packages for CUDA {cuda}", driver >= oldest, advice, "fail")


def _read_gpus() -> Iterator[Gpu]:
    """Yield the GPUs that the management library knows; none without it."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            links = sum(_is_up(pynvml, handle, link) for link in range(MAX_LINKS))
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            yield Gpu(uuid, name, memory.total, memory.free, links)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return


def _is_up(pynvml: ModuleType, handle: object, link: int) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    except pynvml.NVMLError:  # no such link
        return False
