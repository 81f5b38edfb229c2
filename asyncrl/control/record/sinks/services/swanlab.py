"""SwanLab as a sink (`swanlab`). Its key comes from SWANLAB_API_KEY or a login before."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.control.record.sinks.protocol import DEFAULT_PROJECT, RunLabel, SinkKind, load_library


class SwanLabSink:
    """Logs to one experiment of `swanlab`; `arguments` go to `swanlab.init`."""

    name = "swanlab"

    def __init__(self, label: RunLabel, arguments: Mapping[str, object]) -> None:
        self._folder = label.folder / "swanlog"
        self._arguments = {
            "project": DEFAULT_PROJECT,
            "experiment_name": label.name,
            "id": label.id,
            "resume": "allow",
            "logdir": str(self._folder),
            "config": dict(label.settings),
            **arguments,
        }

    def open(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._library = load_library("swanlab")
        self._library.init(**self._arguments)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._library.log(dict(values), step=step)

    def close(self) -> None:
        self._library.finish()


SINK = SinkKind(SwanLabSink, package="swanlab")
