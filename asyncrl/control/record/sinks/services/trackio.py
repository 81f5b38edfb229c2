"""Trackio as a sink (`trackio`): wandb's calls over a local database, or a Hugging Face Space."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.control.record.sinks.protocol import DEFAULT_PROJECT, RunLabel, SinkKind, load_library


class TrackioSink:
    """Logs to one run of `trackio`; `arguments` go to `trackio.init`."""

    name = "trackio"

    def __init__(self, label: RunLabel, arguments: Mapping[str, object]) -> None:
        self._arguments = {
            "project": DEFAULT_PROJECT,
            "name": f"{label.name}-{label.id[:6]}",  # the name is all that a run is known by
            "resume": "allow",
            "config": dict(label.settings),
            **arguments,
        }

    def open(self) -> None:
        self._run = load_library("trackio").init(**self._arguments)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(metrics=dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


SINK = SinkKind(TrackioSink, package="trackio")
