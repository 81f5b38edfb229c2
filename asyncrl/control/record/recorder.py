"""The run's metrics on disk: one JSON row per learner step, and TensorBoard events of the same.

A row that is written again for the same step (after a resume) replaces the older one at reading.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from asyncrl.metrics import unknown_names

Row = dict[str, Any]
log = logging.getLogger(__name__)
FIRST_OF_LIFE = "training/is_first_of_life"
"""1 on the first row after a start or a resume: its time also holds that start."""


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Appends rows; `tensorboard` is the folder of event files, or None."""

    def __init__(self, path: Path, tensorboard: Path | None) -> None:
        _cut_torn_line(path)
        self._file = path.open("a", buffering=1)
        self._writer = _open_writer(tensorboard) if tensorboard is not None else None
        self._warned: set[str] = set()

    def record(self, row: Row) -> None:
        """Write one row; `training/global_step` says which step it belongs to."""
        self._file.write(json.dumps({"time": time.time(), **row}) + "\n")
        self._warn_unknown(row)
        if self._writer is None:
            return
        step = int(row["training/global_step"])
        for name, value in row.items():
            if isinstance(value, int | float) and "/" in name:
                self._writer.add_scalar(name, float(value), step)

    def _warn_unknown(self, row: Row) -> None:
        for name, similar in unknown_names(row.keys() - self._warned).items():
            self._warned.add(name)
            hint = f" (similar: {similar})" if similar else ""
            log.warning(
                "the metric %s is not in the table of metrics%s; it is recorded all the same", name, hint
            )

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _cut_torn_line(path: Path) -> None:
    """Cut what a process that died left of its last line: a row appended to it would be lost too."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _open_writer(folder: Path) -> _Writer:
    """Return a TensorBoard event writer that needs no torch."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    class Writer:
        def __init__(self) -> None:
            self._events = EventFileWriter(str(folder))

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=scalar_value)])
            self._events.add_event(Event(wall_time=time.time(), step=global_step, summary=summary))

        def flush(self) -> None:
            self._events.flush()

        def close(self) -> None:
            self._events.close()

    return Writer()


def load_rows(path: Path) -> list[Row]:
    """Return the rows of `metrics.jsonl` with a step each, the newest of each step and kind, in order."""
    if not path.exists():
        return []
    rows: dict[tuple[int, bool], Row] = {}
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # the process died while it wrote
        row = json.loads(line)
        rows[(row["training/global_step"], is_evaluation(row))] = row
    return [rows[key] for key in sorted(rows)]


def is_evaluation(row: Row) -> bool:
    """Tell whether a row holds an evaluation (verl's `val-core/` names) and not a step."""
    return any(name.startswith("val-core/") for name in row)


def training_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of learner steps."""
    return [row for row in rows if not is_evaluation(row)]


def evaluation_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of evaluations."""
    return [row for row in rows if is_evaluation(row)]
