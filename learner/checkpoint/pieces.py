"""Geometry of the checkpoint format: the place of a piece of state in the whole model (pure).

The format knows no layout of ranks. Every parameter has its Hugging Face name and shape and is seen as
a matrix [first dimension, product of the others]; a vector is a column. A rank holds a flat range of
a local tensor; that range falls into *pieces*, rectangles of full parameters. Invariant: the pieces of
all ranks cover each element of each parameter exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RowRun:
    """Rows of a local matrix that are consecutive rows of one full parameter.

    Attributes:
        local_row: First row in the local matrix.
        num_rows: Number of rows.
        name: Of the full parameter.
        shape: Of the full parameter.
        row: First row in the full parameter.
        column: First column in the full parameter; the run is as wide as the local matrix.
    """

    local_row: int
    num_rows: int
    name: str
    shape: tuple[int, ...]
    row: int
    column: int = 0


@dataclass(frozen=True)
class Piece:
    """A rectangle of a full parameter: rows and columns as (first, past the last)."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns

    def overlap(self, other: Piece) -> Piece | None:
        """Return what two pieces of one parameter share, None if nothing."""
        assert (self.name, self.shape) == (other.name, other.shape)
        rows = (max(self.rows[0], other.rows[0]), min(self.rows[1], other.rows[1]))
        columns = (max(self.columns[0], other.columns[0]), min(self.columns[1], other.columns[1]))
        if rows[0] >= rows[1] or columns[0] >= columns[1]:
            return None
        return Piece(self.name, self.shape, rows, columns)

    def within(self, outer: Piece) -> tuple[slice, slice]:
        """Return the rows and columns of this piece, counted from the corner of `outer`."""
        top, left = outer.rows[0], outer.columns[0]
        return (
            slice(self.rows[0] - top, self.rows[1] - top),
            slice(self.columns[0] - left, self.columns[1] - left),
        )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a tensor seen as a matrix; a scalar is one by one."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def whole(name: str, shape: Sequence[int]) -> Piece:
    """Return the piece that is all of a parameter."""
    num_rows, num_columns = matrix_shape(shape)
    return Piece(name, tuple(shape), (0, num_rows), (0, num_columns))


def pieces_of_range(
    runs: Sequence[RowRun], num_columns: int, start: int, end: int
) -> Iterator[tuple[int, Piece]]:
    """Yield (first element, counted from `start`; piece) for the flat range [start, end) of a local matrix.

    Elements outside all runs (a padded vocabulary) belong to no piece. Each run gives at most three:
    the end of a row, whole rows, the beginning of a row.
    """
    for run in runs:
        first, last = run.local_row * num_columns, (run.local_row + run.num_rows) * num_columns
        at, stop = max(first, start), min(last, end)
        while at < stop:
            row, column = divmod(at - first, num_columns)
            num_whole_rows = 0 if column else (stop - at) // num_columns
            count = num_whole_rows * num_columns or min(stop - at, num_columns - column)
            width = num_columns if num_whole_rows else count
            top, left = run.row + row, run.column + column
            yield (
                at - start,
                Piece(run.name, run.shape, (top, top + max(1, num_whole_rows)), (left, left + width)),
            )
            at += count


def record_file(folder: Path, rank: int) -> Path:
    """Return where `rank` says which pieces it has written."""
    return folder / f"rank-{rank:05d}.json"
