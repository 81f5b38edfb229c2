"""Weights & Biases as a sink (`wandb`). Its key comes from WANDB_API_KEY or the netrc file."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.control.record.sinks.protocol import DEFAULT_PROJECT, RunLabel, SinkKind, load_library

STEP = "training/global_step"


class WandbSink:
    """Logs to one run of `wandb`; `arguments` go to `wandb.init`."""

    name = "wandb"

    def __init__(self, label: RunLabel, arguments: Mapping[str, object]) -> None:
        self._arguments = {
            "project": DEFAULT_PROJECT,
            "name": label.name,
            "id": label.id,
            "resume": "allow",
            "dir": str(label.folder),
            "config": dict(label.settings),
            **arguments,
        }

    def open(self) -> None:
        self._run = load_library("wandb").init(**self._arguments)
        # wandb's own step may only rise, and an evaluation of step n ends while n + 1 is trained.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, STEP: step})

    def close(self) -> None:
        self._run.finish()


SINK = SinkKind(WandbSink, package="wandb")
