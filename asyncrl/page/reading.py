"""Incremental reader of the run's folder, for what the page shows beyond the snapshot.

Owns how much is read: of metrics a sample of what was there before and then what is new, of the journal
the newest payloads. It changes nothing, and needs neither the ledger's events nor the learner.
Invariant: a look costs about the same after a week as after an hour.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from asyncrl.control.rows.row_files import lines_of, older_files
from asyncrl.core.metrics.metric import Row

log = logging.getLogger(__name__)

WHOLE_FILE_BYTES = 8 << 20
"""Of metrics, that are read in one go: two thousand steps or more."""
NUM_SAMPLES, NUM_SAMPLED_FILES = 400, 20


class RowTail:
    """The rows of a growing `metrics.jsonl`. Of long files the first `read` gives a sample."""

    def __init__(self, path: Path, whole_file_bytes: int = WHOLE_FILE_BYTES) -> None:
        self._path = path
        self._whole_file_bytes = whole_file_bytes
        self._inode = self._offset = 0

    def read(self) -> list[Row]:
        """Return whole rows that were added since the last call, oldest first.

        Rows that were added right before their file was compressed may be missing.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return []
        sampled = list(self._sample_older()) if not self._inode else []
        if found.st_ino != self._inode:  # the rows before were compressed
            self._inode, self._offset = found.st_ino, 0
        size = found.st_size
        if size < self._offset:  # a torn line was cut at a restart
            self._offset = size
        with self._path.open("rb") as file:
            if size - self._offset > self._whole_file_bytes:
                sampled += self._sample(file, size)
            file.seek(self._offset)
            data = file.read(size - self._offset)
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [row for line in [*sampled, *data[:end].splitlines()] if (row := _parse(line)) is not None]

    def _sample_older(self) -> Iterator[bytes]:
        """Yield lines that are spread over compressed files, of a few of which all bytes are read."""
        files = older_files(self._path)
        for path in files[:: 1 + len(files) // NUM_SAMPLED_FILES]:
            lines = list(lines_of(path))
            yield from lines[:: 1 + len(lines) // (NUM_SAMPLES // NUM_SAMPLED_FILES)]

    def _sample(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        """Yield lines that are spread over what is not read, and leave the newest part to be read whole."""
        start = size - self._whole_file_bytes // 4
        for number in range(NUM_SAMPLES):
            file.seek(self._offset + (start - self._offset) * number // NUM_SAMPLES)
            file.readline()  # the rest of a line
            yield file.readline()
        file.seek(start)
        self._offset = start + len(file.readline())


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # a write that was torn by a crash
        return None
    return row if isinstance(row, dict) else None
