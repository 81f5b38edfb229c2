"""The run's metrics: one JSON row per learner step on disk; the same rows go to the run's sinks.

The files are the record: a row is in them before any sink hears of it, and no sink can hold it up.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrl.control.record.sinks.outbox import Outbox
from asyncrl.control.rows.row_files import RowWriter, is_evaluation
from asyncrl.core.metrics import unknown_names
from asyncrl.core.metrics.metric import Row
from asyncrl.core.runtime.interface import Runtime

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""That all sinks together may take at the end."""


class Recorder:
    """Appends rows to `path` and hands them to `sinks`.

    Attributes:
        write_error: Why the last row is not on the disk yet, empty if it is. See `write_rest`.
    """

    def __init__(self, path: Path, runtime: Runtime, sinks: Sequence[Outbox] = ()) -> None:
        self._runtime = runtime
        self._writer = RowWriter(path)
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
        self._unwritten += json.dumps({"time": self._runtime.wall_ns() / 1e9, **row}) + "\n"
        self._write()
        self._warn_unknown(row)
        for sink in self._sinks:
            sink.put(row, int(row["training/global_step"]))
        return row

    def write_rest(self) -> None:
        """Write the rows that the disk did not take before; `write_error` says whether it takes them now."""
        if self._unwritten:
            self._write()

    def _write(self) -> None:
        try:
            self._writer.append(self._unwritten)
            self._unwritten = self.write_error = ""
        except OSError as error:  # a full disk
            if not self.write_error:
                log.error("%d rows could not be written yet: %s", self._unwritten.count("\n"), error)
            self.write_error = f"{error}"

    def _warn_unknown(self, row: Row) -> None:
        for name, similar in unknown_names(row.keys() - self._warned).items():
            self._warned.add(name)
            hint = f" (similar: {similar})" if similar else ""
            log.warning(
                "the metric %s is not in the table of metrics%s; it is recorded all the same", name, hint
            )

    def close(self) -> None:
        """Write what is left, and close the sinks within `CLOSE_S` seconds whatever they do."""
        self.write_rest()
        for sink in self._sinks:
            sink.begin_close()
        end = self._runtime.now() + CLOSE_S
        for sink in self._sinks:
            sink.close(max(0.0, end - self._runtime.now()))


def lost_rows(recorded: Iterable[Row], kept: Sequence[Row]) -> list[Row]:
    """Return those rows of the learner's own log that the record lacks, the last of each step, in order.

    A row is known by its step and time together; which of two is newer, their order says: a clock may be set
    back between two incarnations of the learner.
    """
    known = {_key(row) for row in recorded if not is_evaluation(row)}
    last = {row["training/global_step"]: row for row in kept}
    return [row for row in kept if last[row["training/global_step"]] is row and _key(row) not in known]


def _key(row: Row) -> tuple[float, float]:
    return row["training/global_step"], row["time"]


def training_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of learner steps."""
    return [row for row in rows if not is_evaluation(row)]
