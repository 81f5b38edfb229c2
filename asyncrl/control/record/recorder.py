"""The run's metrics on disk: one JSON row per learner step; the same rows go to the run's sinks.

The file is the record: a row is in it before any sink hears of it, and no sink can hold it up. A row that
is written again for the same step (after a resume) replaces the older one at reading.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.control.record.sinks.outbox import Outbox
from asyncrl.durable import append_lines
from asyncrl.errors import DataError
from asyncrl.metrics import unknown_names

Row = dict[str, Any]
log = logging.getLogger(__name__)

TAIL_BYTES = 1 << 16
"""Of a file of rows: the newest dozen."""
CLOSE_S = 5.0
"""That all sinks together may take at the end."""


class Recorder:
    """Appends rows to `path` and hands them to `sinks`.

    Attributes:
        write_error: Why the last row is not on the disk yet, empty if it is. It is written with the next one.
    """

    def __init__(self, path: Path, sinks: Sequence[Outbox] = ()) -> None:
        _cut_torn_line(path)
        path.touch()
        self._path = path
        self._unwritten = ""
        self._sinks = sinks
        self._warned: set[str] = set()
        self.write_error = ""

    def record(self, row: Row) -> Row:
        """Write one row and return it as it was written, with what the sinks have dropped so far.

        `training/global_step` says which step it belongs to.
        """
        for sink in self._sinks:
            row = row | sink.metrics()
        self._unwritten += json.dumps({"time": time.time(), **row}) + "\n"
        self._write()
        self._warn_unknown(row)
        for sink in self._sinks:
            sink.put(row, int(row["training/global_step"]))
        return row

    def _write(self) -> None:
        try:
            append_lines(self._path, self._unwritten)
            self._unwritten = self.write_error = ""
        except OSError as error:  # a full disk
            self.write_error = f"{error}"
            log.error("%d rows could not be written yet: %s", self._unwritten.count("\n"), error)

    def _warn_unknown(self, row: Row) -> None:
        for name, similar in unknown_names(row.keys() - self._warned).items():
            self._warned.add(name)
            hint = f" (similar: {similar})" if similar else ""
            log.warning(
                "the metric %s is not in the table of metrics%s; it is recorded all the same", name, hint
            )

    def close(self) -> None:
        """Write what is left, and close the sinks within `CLOSE_S` seconds whatever they do."""
        self._write()
        for sink in self._sinks:
            sink.begin_close()
        end = time.monotonic() + CLOSE_S
        for sink in self._sinks:
            sink.close(max(0.0, end - time.monotonic()))


def _cut_torn_line(path: Path) -> None:
    """Cut what a process that died left of its last line: a row appended to it would be lost too."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def load_rows(path: Path) -> list[Row]:
    """Return the rows of `metrics.jsonl` with a step each, the newest of each step and kind, in order.

    Raises:
        DataError: A whole line is no row.
    """
    if not path.exists():
        return []
    rows: dict[tuple[int, bool], Row] = {}
    for number, line in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        row = _read_row(line, f"{path}:{number}")  # not what a process that died left of the last line
        rows[(row["training/global_step"], is_evaluation(row))] = row
    return [rows[key] for key in sorted(rows)]


def newest_rows(path: Path, num_bytes: int = TAIL_BYTES) -> list[Row]:
    """Return the rows at the end of `metrics.jsonl`, oldest first; lines that are none are left out."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for line in lines if size <= num_bytes else lines[1:]:
        with contextlib.suppress(DataError):
            rows.append(_read_row(line.decode(errors="replace"), str(path)))
    return rows


def _read_row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _no_row(place, str(error)) from error
    if not isinstance(row, dict) or not isinstance(row.get("training/global_step"), int | float):
        raise _no_row(place, "it has no number 'training/global_step'")
    return row


def _no_row(place: str, why: str) -> DataError:
    return DataError(
        f"{place}: this line is not a metrics row: {why}",
        hint="Move it to another file; the rows around it can be read then",
    )


def lost_rows(recorded: Iterable[Row], kept: Iterable[Row]) -> list[Row]:
    """Return those rows of the learner's own log that the record lacks, the newest of each step, in order."""
    times = {row["training/global_step"]: row["time"] for row in training_rows(recorded)}
    newest = {row["training/global_step"]: row for row in kept}
    return [newest[step] for step in sorted(newest) if newest[step]["time"] > times.get(step, 0.0)]


def is_evaluation(row: Row) -> bool:
    """Tell whether a row holds an evaluation (verl's `val-core/` names) and not a step."""
    return any(name.startswith("val-core/") for name in row)


def training_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of learner steps."""
    return [row for row in rows if not is_evaluation(row)]


def evaluation_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of evaluations."""
    return [row for row in rows if is_evaluation(row)]
