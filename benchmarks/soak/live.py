"""Live runs of the soak: `scripted` engines with tiny steps, or `vllm` and the quickstart as it ships.

Owns the configurations, and the sampling of a run from its first steps on. The run ends with the `with` block
of `benchmarks.calibration.live.live_run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ServiceFailed
from benchmarks.calibration.live import builtin_paths, live_run, step_of
from benchmarks.pipeline.cases import FOREVER, make_task
from benchmarks.soak.sampling import Sample, read_values
from configs import shipped

STALLED_S = 120.0
"""Without a step: the soak has failed."""
SCRIPTED: Mapping[str, Any] = {
    "data.eval": "null",
    "eval.every_steps": 0,
    "reward.fn": "gsm8k_flexible",
    "rollout.engine": "scripted",
    "rollout.group_size": 2,
    "learner.groups_per_step": 2,
    "learner.minibatches": 1,
    "checkpoint.every_steps": 1000,
}
"""About 20 steps a second on two cores: Megatron-core and weight sync are real, tokens are drawn."""


def make_config(engine: str, folder: Path, say: Callable[[str], None]) -> Config:
    """Return the configuration of a soak with engine `scripted` or `vllm`, in `folder`."""
    values = {"run.name": f"soak-{engine}", "run.dir": folder, "learner.steps": FOREVER}
    if engine == "scripted":
        task = make_task(folder / "task")
        values |= {**SCRIPTED, "model.path": task, "data.train": task / "train.parquet"}
        paths: tuple[str, ...] = ()
    else:
        paths = tuple(builtin_paths(say))
    return load_config(
        shipped()["quickstart"], [*(f"{key}={value}" for key, value in values.items()), *paths]
    )


def soak(
    config: Config,
    is_enough: Callable[[Sample], bool],
    every_s: float,
    say: Callable[[str], None],
) -> list[Sample]:
    """Run until `is_enough` says so of the newest sample; return all samples.

    Raises:
        ServiceFailed: The run did not start, ended, or makes no steps.
    """
    samples: list[Sample] = []
    with live_run(config, say) as live:
        began = stepped = time.monotonic()
        while not samples or not is_enough(samples[-1]):
            now = time.monotonic()
            before = samples[-1].step if samples else 0
            step = max(before, step_of(live.client))  # a supervisor that is busy or replaced ends no soak
            if step > before:
                stepped = now
            if now - stepped > STALLED_S:
                raise ServiceFailed(f"the run has made no step for {STALLED_S:g} s after step {step}")
            samples.append(Sample(now - began, step, read_values(live.handle)))
            time.sleep(max(0.0, now + every_s - time.monotonic()))
    return samples
