"""TensorBoard's event files as a sink; needs no torch and no service."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.control.record.sinks.protocol import load_library


class TensorBoardSink:
    """Writes scalars into event files under `folder`."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> None:
        events = load_library("tensorboard.compat.proto.event_pb2")
        summaries = load_library("tensorboard.compat.proto.summary_pb2")
        writers = load_library("tensorboard.summary.writer.event_file_writer")
        self._event, self._summary = events.Event, summaries.Summary
        self._writer: Any = writers.EventFileWriter(str(self._folder))

    def write(self, values: Mapping[str, float], step: int) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()
