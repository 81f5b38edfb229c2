"""Fetcher of the learner's rows, which tolerates slow answers.

Owns the one question that is open. Invariant: an answer that is late is waited on for, from pulse to pulse.
Asked anew each time, a learner that takes longer than a pulse may wait would never hand over a row: under
load, with its thread for questions starved by the training, it takes many seconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from asyncrl.control.ray.launcher import Launcher
from asyncrl.core.errors import DeadlineExceeded, ServiceFailed
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import HandOverRows, Rows
from asyncrl.core.status.service import LEARNER

log = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 60.0
"""Deadline of a call, which is then repeated; a learner silent for so long is ended (`fleet/machine.py`)."""


@dataclass
class _Question:
    """Question to one incarnation of the learner, and its answer."""

    incarnation: int
    after: int
    is_over: Event
    answer: Rows | None = None


class RowFetcher:
    """Fetcher with its own thread, for a caller that waits one pulse."""

    def __init__(self, launcher: Launcher, runtime: Runtime) -> None:
        self._launcher = launcher
        self._runtime = runtime
        self._open: _Question | None = None

    def fetch(self, incarnation: int, after: int, wait_s: float) -> Rows | None:
        """Return the rows from index `after` on, None while the learner has not answered.

        The learner forgets the rows before `after`: they were taken.

        Args:
            incarnation: Of the learner; what an earlier one was asked is forgotten.
            wait_s: For the answer, this time.
        """
        question = self._open
        if question is None or (question.incarnation, question.after) != (incarnation, after):
            question = self._open = self._begin(_Question(incarnation, after, self._runtime.event()))
        if not question.is_over.wait(wait_s):
            return None
        self._open = None
        return question.answer

    def _begin(self, question: _Question) -> _Question:
        try:
            self._runtime.spawn("learner-rows", partial(self._ask, question))
        except RuntimeError as error:  # no more threads for now: the next pulse asks again
            log.warning("the learner could not be asked for its rows: %s", error)
            question.is_over.set()
        return question

    def _ask(self, question: _Question) -> None:
        try:
            asked = HandOverRows(question.after)
            question.answer = self._launcher.command(LEARNER, asked, ANSWER_DEADLINE_S)
        except (DeadlineExceeded, ServiceFailed) as error:  # the next pulse asks again, or sees why not
            log.info("the learner did not hand over its rows: %s", error)
        finally:
            question.is_over.set()
