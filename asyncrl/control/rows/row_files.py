"""The files of a run's metric rows: `metrics.jsonl`, and older rows as `metrics.000001.jsonl.gz` and so on.

Owns the form and the names of these files. A file that has grown to `SEGMENT_BYTES` is compressed: no row is
lost, and `zcat -f metrics.*.jsonl.gz metrics.jsonl` prints all of them. A row that is written again for the
same step (after a resume) replaces the older one at reading.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from asyncrl.core.errors import DataError
from asyncrl.core.files.durable import append_lines
from asyncrl.core.metrics.metric import Row
from asyncrl.core.metrics.run_names import FIRST_AFTER_START

log = logging.getLogger(__name__)

SEGMENT_BYTES = 16 << 20
"""About 2,200 rows; compressing them takes 0.3 s."""
_OLD_FIRST = "training/is_first_of_life"
"""`FIRST_AFTER_START` in rows of an older asyncrl."""
TAIL_BYTES = 1 << 16
"""Of a file of rows: the newest dozen."""


class RowWriter:
    """Appends rows to `path`, and compresses what is there when it has grown to `segment_bytes`."""

    def __init__(self, path: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        _cut_torn_line(path)
        path.touch()
        self._path = path
        self._segment_bytes = self._full_bytes = segment_bytes

    def append(self, text: str) -> None:
        """Write whole lines. Raises OSError where the disk takes none of them."""
        size = append_lines(self._path, text)
        if size < self._full_bytes:
            return
        try:
            compress(self._path)
            self._full_bytes = self._segment_bytes
        except OSError as error:  # the disk is nearly full: the file grows on for a while
            self._full_bytes = size + self._segment_bytes // 16
            log.warning("%s could not be compressed yet: %s", self._path, error)


def compress(path: Path) -> None:
    """Move the rows of `path` into a compressed file after the older ones.

    Ended in the middle, the rows are in both files, which reading does not mind.

    Raises:
        OSError: The disk takes no more; the rows are where they were.
    """
    numbers = [_number_of(older) for older in older_files(path)]
    target = path.with_name(f"{path.stem}.{max(numbers, default=0) + 1:06d}{path.suffix}.gz")
    _replace(target, path.read_bytes())
    empty = path.with_name(f".{path.name}.empty")
    empty.touch()
    empty.replace(path)  # a new file, not a shorter one: readers notice that


def older_files(path: Path) -> list[Path]:
    """Return the compressed files of the rows before those in `path`, the oldest first."""
    return sorted(path.parent.glob(f"{path.stem}.*{path.suffix}.gz"), key=_number_of)


def remove_rows(path: Path) -> None:
    """Remove all rows."""
    for one in (*older_files(path), path):
        one.unlink(missing_ok=True)


def keep_rows(path: Path, is_kept: Callable[[Row], bool]) -> None:
    """Drop all other rows, and a torn last line."""
    for one in (*older_files(path), path):
        if one.exists():
            lines = [line for line in lines_of(one) if line.endswith(b"\n") and is_kept(json.loads(line))]
            _replace(one, b"".join(lines))


def iterate_rows(path: Path) -> Iterator[Row]:
    """Yield the rows in the order in which they were written, one at a time: there may be a million.

    Raises:
        DataError: A whole line is no row.
    """
    for one in (*older_files(path), path):
        if not one.exists():
            continue
        for number, line in enumerate(lines_of(one), 1):
            if line.endswith(b"\n"):  # without the partial last line of a process that died
                yield _read_row(line.decode(errors="replace"), f"{one}:{number}")


def load_rows(path: Path, is_wanted: Callable[[Row], bool] = lambda _: True) -> list[Row]:
    """Return the rows that are wanted, the newest of each step and kind, in order.

    Raises:
        DataError: A whole line is no row.
    """
    found = (row for row in iterate_rows(path) if is_wanted(row))
    rows = {(row["training/global_step"], is_evaluation(row)): row for row in found}
    return [rows[key] for key in sorted(rows)]


def newest_rows(path: Path, num_bytes: int = TAIL_BYTES) -> list[Row]:
    """Return the rows at the end, oldest first; lines that are none are left out."""
    lines = _tail(path, num_bytes)
    if not lines and (older := older_files(path)):  # it was compressed a moment ago
        lines = b"".join(lines_of(older[-1]))[-num_bytes:].split(b"\n")[1:]
    rows = []
    for line in lines:
        with contextlib.suppress(DataError):
            rows.append(_read_row(line.decode(errors="replace"), str(path)))
    return rows


def is_evaluation(row: Mapping[str, object]) -> bool:
    """Tell whether a row holds an evaluation (verl's `val-core/` names) and not a step."""
    return any(name.startswith("val-core/") for name in row)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, compressed or not, each with its end."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _tail(path: Path, num_bytes: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    return lines if size <= num_bytes else lines[1:]


def _replace(path: Path, data: bytes) -> None:
    """Put `data` in place of a file, whole or not at all, compressed if the name says so."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with gzip.open(temporary, "wb", 6) if path.suffix == ".gz" else temporary.open("wb") as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _number_of(path: Path) -> int:
    number = path.name.split(".")[-3]
    return int(number) if number.isdigit() else 0


def _cut_torn_line(path: Path) -> None:
    """Cut the partial last line of a process that died: a row appended to it would be lost too."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _read_row(line: str, place: str) -> Row:
    try:
        found: object = json.loads(line)
    except ValueError as error:
        raise _no_row(place, str(error)) from error
    if not isinstance(found, dict) or not isinstance(found.get("training/global_step"), int | float):
        raise _no_row(place, "it has no number 'training/global_step'")
    row: Row = found
    if _OLD_FIRST in row:
        row[FIRST_AFTER_START] = row.pop(_OLD_FIRST)
    return row


def _no_row(place: str, why: str) -> DataError:
    return DataError(
        f"{place}: this line is not a metrics row: {why}",
        hint="Move it to another file; the rows around it can be read then",
    )
