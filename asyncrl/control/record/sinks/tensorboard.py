"""TensorBoard's event files as a sink; needs no torch and no service.

Of a long run not every step is written: TensorBoard shows a thousand points of a curve, and a million steps
would take 6 GB. `metrics.jsonl` has them all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.control.record.sinks.protocol import load_library
from asyncrl.control.rows.row_files import is_evaluation

NUM_WHOLE_STEPS = 10_000
"""So many steps are written; of the steps up to twice as many every second one, and so on."""


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
        if not is_drawn(step) and not is_evaluation(values):
            return
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def is_drawn(step: int) -> bool:
    """Tell whether a step's values are written.

    >>> [is_drawn(step) for step in (9_999, 10_001, 10_002, 1_000_000, 1_000_064)]
    [True, False, True, False, True]
    """
    stride = 1 << max(0, ((step - 1) // NUM_WHOLE_STEPS).bit_length())
    return step % stride == 0
