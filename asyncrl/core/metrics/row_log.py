"""The learner's own log of its metric rows: in memory until they are handed over, the newest also on disk.

Rank 0 adds each row before its step is booked. The supervisor asks for rows by their index in the learner's
incarnation; to ask for those from an index on is to have taken the ones before it. From the files the
supervisor takes the rows that it was not handed: it was away, or the learner died. Owns the files' place
and form.

Invariants: a step that a checkpoint holds has its row here, or in the run's record. Memory holds the rows
that were not taken; the disk at most two files of `ROTATE_BYTES`, and beyond these rows that were not taken.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from asyncrl.core.files.durable import append_lines
from asyncrl.core.metrics.metric import Row
from asyncrl.core.metrics.run_names import FIRST_AFTER_START

NAME, OLDER_NAME = "learner_rows.jsonl", "learner_rows.older.jsonl"
ROTATE_BYTES = 32 << 20
"""Of a file: about 5,000 rows."""

log = logging.getLogger(__name__)


class HandedRows(NamedTuple):
    """Rows that were not taken yet, from index `first` of the learner's incarnation on."""

    first: int
    rows: list[Row]


class RowLog:
    """Takes the rows of one incarnation. Rows are added by one thread and handed over by another.

    Example:
        rows = RowLog(run_dir); rows.add(row)
        rows.hand_over(0)  # HandedRows(first=0, rows=[row]): the row is kept
        rows.hand_over(1)  # HandedRows(first=1, rows=[]): it was taken, and is forgotten
    """

    def __init__(self, run_dir: Path, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._path, self._older = paths_of(run_dir)[::-1]
        self._rotate_bytes = rotate_bytes
        self._lock = threading.Lock()
        self._untaken: deque[Row] = deque()
        self._num_taken = self._num_rows = 0
        self._end_of_older = 1  # with a row of this incarnation, those of the ones before it were taken too

    def add(self, row: Mapping[str, float]) -> None:
        """Keep one row, and write it in one write: a process that dies has written it or has not."""
        with self._lock:
            is_first = self._num_rows == 0
            self._untaken.append(dict(row))
            self._num_rows += 1
        try:
            line = json.dumps({**row, FIRST_AFTER_START: float(is_first)}) + "\n"
            if append_lines(self._path, line) > self._rotate_bytes:
                self._rotate()
        except OSError as error:  # the disk is full, or the folder is gone
            log.warning("the row of step %s was not written down: %s", row["training/global_step"], error)

    def _rotate(self) -> None:
        """Begin a new file, unless the one that it would replace has a row that was not taken."""
        if self._num_taken >= self._end_of_older:
            self._path.replace(self._older)
            self._end_of_older = self._num_rows

    def hand_over(self, first: int) -> HandedRows:
        """Forget the rows before index `first`, and return those from there on."""
        with self._lock:
            while self._untaken and self._num_taken < first:
                self._untaken.popleft()
                self._num_taken += 1
            return HandedRows(self._num_taken, list(self._untaken))


def paths_of(run_dir: Path) -> tuple[Path, Path]:
    """Return the files of the log, the older rows first; neither needs to be there."""
    return run_dir / OLDER_NAME, run_dir / NAME


def read_rows(run_dir: Path) -> list[Row]:
    """Return the rows on disk as they were written, none if there is no log; a torn line is left out."""
    return [row for path in paths_of(run_dir) for row in _rows_in(path)]


def _rows_in(path: Path) -> Iterator[Row]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            row: Row = json.loads(line)
        except ValueError:
            continue
        yield row
