"""The shipped configurations for GPUs against this machine: which fits, and what to change of the others."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.cli.doctor.finding import Finding
from asyncrl.control.machine.resources import count_gpus
from asyncrl.core.config.load import load_config
from asyncrl.planner.plan.fit import Machine, find_fit
from asyncrl.planner.plan.footprint import capacity


def check_presets(machine: Machine | None = None) -> Iterator[Finding]:
    """Yield a line for each preset for GPUs, or one for all where there is no GPU.

    Args:
        machine: Taken for this one.
    """
    from configs import shipped

    there = machine or Machine(count_gpus(), capacity.measure())
    if not there.num_gpus:
        yield Finding("presets", "ok", "quickstart runs here; those for GPUs do not")
        return
    for name, path in shipped().items():
        config = load_config(path)
        if config.rollout.gpus:
            elsewhere = "; replicas on other nodes" if config.launcher.is_cluster else ""
            yield Finding(f"preset {name}", "ok", f"{find_fit(config, there).tell()}{elsewhere}")
