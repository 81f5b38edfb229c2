"""Rows of a run, taken down from its learner and its buffer: each step's and each evaluation's, once.

The learner hands its rows over, and keeps a log of them beside: what it wrote and handed to nobody is taken
from there. Steps that a learner takes again come as rows again, and replace the older ones at reading.
"""

from __future__ import annotations

import logging

from asyncrl.control.ray.launcher import Launcher
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.rows import metering
from asyncrl.control.rows.recorder import Recorder, lost_rows
from asyncrl.control.rows.row_fetcher import RowFetcher
from asyncrl.control.rows.row_files import is_evaluation, iterate_rows, load_rows, newest_rows
from asyncrl.core.metrics.metric import Row
from asyncrl.core.metrics.row_log import read_rows
from asyncrl.core.metrics.run_names import FIRST_AFTER_START
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.status.statuses import Statuses

log = logging.getLogger(__name__)

ROWS_WAIT_S = 1.0
"""In a pulse. A late answer is not lost: the next pulse waits on for it."""
SAME_ROW = ("training/global_step", "timing_s/step")
"""No two rows have both alike, save one that was taken down twice."""


class RowCollector:
    """See the module.

    Attributes:
        newest: The newest row of a step, as it was written; empty before the first.
        evaluation: The newest row of an evaluation.
    """

    def __init__(self, run_dir: RunDir, launcher: Launcher, recorder: Recorder, runtime: Runtime) -> None:
        self._run_dir, self._recorder, self._runtime = run_dir, recorder, runtime
        self._fetcher = RowFetcher(launcher, runtime)
        self._meter = metering.Meter()
        self._incarnation = self._num_rows = 0
        self._must_skip = False  # rows that are on record; until it is known which, none is recorded
        evaluations = load_rows(run_dir.metrics, is_evaluation)
        self._seen_evaluations = metering.evaluation_ids(evaluations)
        self.newest: Row = {}
        self.evaluation: Row = evaluations[-1] if evaluations else {}

    @property
    def write_error(self) -> str:
        """Error that keeps the last row off the disk, empty if it is written."""
        return self._recorder.write_error

    def begin(self, incarnation: int, *, is_taken_over: bool) -> None:
        """Record the rows that an earlier supervisor left.

        Args:
            incarnation: Of the learner.
            is_taken_over: The learner lives on from that supervisor, which has recorded some of its rows.
        """
        self._incarnation = incarnation
        self._recover()
        self._must_skip = is_taken_over

    def note(self, now: float, statuses: Statuses) -> None:
        """Note the counters from which the rates of the next rows are computed."""
        self._meter.note(now, statuses)

    def write_rest(self) -> None:
        """Write the rows that the disk did not take before."""
        self._recorder.write_rest()

    def collect(self, statuses: Statuses, incarnation: int) -> list[Row]:
        """Take down the learner's rows since the last time, and return them.

        Args:
            incarnation: Of the learner.
        """
        if statuses.learner is None:
            return []
        if incarnation != self._incarnation:
            self._incarnation, self._num_rows = incarnation, 0
            self._must_skip = self._recover()
        if self._must_skip:
            self._skip_known()
        if self._must_skip:
            return []
        handed = self._fetcher.fetch(incarnation, self._num_rows, ROWS_WAIT_S)
        if handed is None or not handed.rows:
            return []
        rows = handed.rows
        is_first = handed.first == 0  # its time holds the start of this incarnation, not a step's work
        self._num_rows = handed.first + len(rows)
        rates = self._meter.update(self._runtime.now(), statuses)
        recorded = []
        for row in rows:
            first = {FIRST_AFTER_START: float(is_first and row is rows[0])}
            recorded.append(self._recorder.record({**row, **rates, **first}))
        self.newest = recorded[-1]
        return recorded

    def collect_evaluations(self, statuses: Statuses) -> None:
        """Take down the evaluations that have ended."""
        buffer = statuses.buffer
        for evaluation in buffer.evaluations if buffer is not None else ():
            if evaluation.id in self._seen_evaluations:
                continue
            self._seen_evaluations.add(evaluation.id)
            self.evaluation = self._recorder.record(metering.evaluation_row(evaluation))

    def has_evaluation(self, number: int) -> bool:
        """Tell whether this evaluation is taken down; 0 is none."""
        return number in {0, *self._seen_evaluations}

    def close(self) -> None:
        """Record the rows that the learner never handed over, and close the files."""
        self._recover()
        self._run_dir.remove_learner_rows()
        self._recorder.close()

    def _recover(self) -> bool:
        """Record rows that a learner wrote and never handed over; return whether there were any."""
        try:
            lost = lost_rows(iterate_rows(self._run_dir.metrics), read_rows(self._run_dir.path))
        except OSError as error:
            log.warning("the learner's own log of its rows cannot be read: %s", error)
            return False
        for row in lost:
            self._recorder.record(row)
        return bool(lost)

    def _skip_known(self) -> None:
        """Go on after the living learner's last row on record, once it says which rows it has."""
        handed = self._fetcher.fetch(self._incarnation, 0, ROWS_WAIT_S)
        if handed is None:
            return
        self._must_skip = False
        recorded = [row for row in newest_rows(self._run_dir.metrics) if not is_evaluation(row)]
        if not recorded:
            return
        last = recorded[-1]
        is_known = [all(last.get(key) == row[key] for key in SAME_ROW) for row in handed.rows]
        num_known = len(is_known) - is_known[::-1].index(True) if any(is_known) else 0
        self.newest, self._num_rows = last, handed.first + num_known
