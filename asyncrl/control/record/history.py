"""The numbers of a whole run in columns: 8 bytes a value, where a row of metrics is a dict of 20 kB."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncrl.control.rows.metering import accuracy
from asyncrl.control.rows.row_files import is_evaluation
from asyncrl.core.metrics.metric import Row

STEP = "training/global_step"
Column = NDArray[np.float64]
"""One value per step; NaN where a row has none."""


@dataclass(frozen=True)
class History:
    """Kept values of the rows of a run.

    Attributes:
        columns: By metric name, `[number of steps]` float64, in the order of the steps.
        last: The row of the last step, whole; empty before the first.
        held_out: Step and accuracy of each evaluation that has one, in order.
    """

    columns: Mapping[str, Column]
    last: Mapping[str, float] = field(default_factory=dict)
    held_out: tuple[tuple[int, float], ...] = ()

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.columns[STEP])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def where(self, is_kept: NDArray[np.bool_]) -> History:
        """Return the steps at which `is_kept`, `[number of steps]`, holds."""
        columns = {name: values[is_kept] for name, values in self.columns.items()}
        return History(columns, self.last, self.held_out)


def read_history(rows: Iterable[Row], names: Iterable[str]) -> History:
    """Return the columns `names` of `rows`, which are read one at a time; the newest row of a step counts."""
    values = {name: array("d") for name in (STEP, *names)}
    held_out: dict[int, float] = {}
    last: Mapping[str, float] = {}
    for row in rows:
        if is_evaluation(row):
            if (found := accuracy(row)) is not None:
                held_out[int(row[STEP])] = found
            continue
        last = row if row[STEP] >= last.get(STEP, 0) else last
        for name, column in values.items():
            column.append(_number(row.get(name)))
    columns = {name: np.frombuffer(column) for name, column in values.items()}
    _, newest = np.unique(columns[STEP][::-1], return_index=True)
    chosen = len(columns[STEP]) - 1 - newest
    return History(
        {name: column[chosen] for name, column in columns.items()}, last, tuple(sorted(held_out.items()))
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
