"""CPUs and GPUs of this machine, and those that a run asks Ray for."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.status.service import NUM_INDICES

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU that the driver has given to this machine or container."""

SLACK = 1e-6


def count_cpus(config: Config, replicas: int) -> float:
    """Return the CPUs that a run with so many rollout replicas asks Ray for on this machine, at least."""
    return config.learner.cpus * count_ranks(config) + config.rollout.cpus * replicas


def count_ranks(config: Config) -> int:
    """Return the learner ranks that must be on this machine: on a cluster the first."""
    return 1 if config.launcher.is_cluster else config.learner.num_ranks


def count_gpus_wanted(config: Config, replicas: int) -> int:
    """Return the GPUs of this machine that so many rollout replicas and the learner need, shares joined."""
    asked = [config.learner.gpus] * count_ranks(config) + [config.rollout.gpus] * replicas
    free = list[float]()  # of each GPU that is shared
    for share in sorted((one for one in asked if 0 < one < 1), reverse=True):
        at = next((index for index, rest in enumerate(free) if share <= rest + SLACK), len(free))
        free[at : at + 1] = [(free[at] if at < len(free) else 1.0) - share]
    return len(free) + sum(int(one) for one in asked)


def count_gpus() -> int:
    """Return the NVIDIA GPUs that processes started from here may use.

    As Ray does: CUDA_VISIBLE_DEVICES can only lower the number.
    """
    num_there = len(list(DRIVER_GPUS.iterdir())) if DRIVER_GPUS.is_dir() else 0
    visible = visible_gpus()
    return num_there if visible is None else min(num_there, len(visible))


def visible_gpus() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names, numbers or ids, up to the first that is no GPU; None: all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = (name.strip() for name in visible.split(","))
    return [*itertools.takewhile(lambda one: one.startswith(("GPU-", "MIG-")) or one.isdecimal(), names)]


def check_resources(config: Config, replicas: int) -> Iterator[str]:
    """Name the resources that this machine lacks for so many rollout replicas; a cluster's lie elsewhere."""
    if replicas > NUM_INDICES:
        yield f"rollout.replicas asks for {replicas} replicas; they are numbered below {NUM_INDICES}"
        return
    replicas = 0 if config.launcher.is_cluster else replicas
    num_cpus, num_gpus = os.cpu_count() or 1, count_gpus()
    cpus, gpus = count_cpus(config, replicas), count_gpus_wanted(config, replicas)
    if cpus > num_cpus:
        yield (
            f"rollout.cpus and learner.cpus ask for {cpus:g} CPUs, this machine has {num_cpus}; "
            "lower them or rollout.replicas"
        )
    if gpus > num_gpus:
        yield (
            f"rollout.gpus and learner.gpus ask for {gpus} GPUs, this machine has {num_gpus}; "
            "set both to 0 to run on CPU"
        )


def check_replicas(config: Config, replicas: int) -> None:
    """Raise ConfigError if this machine has no room for so many rollout replicas."""
    problems = list(check_resources(config, replicas))
    if problems:
        raise ConfigError("\n".join(problems))
