"""Orders to evaluate, which ride on the ledger: each is handed to one replica at a time (pure).

Owns who works on which order. An order goes to the first replica whose weights have seen enough
steps; it is free again when that replica retires or falls silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import Evaluation
from asyncrl.errors import LedgerError


class EvaluationOrders:
    """Commands on evaluations, part of the ledger.

    Args:
        emit: Applies an event and keeps it for the journal.
    """

    def __init__(self, state: LedgerState, emit: Callable[[ev.Event], None]) -> None:
        self._state = state
        self._emit = emit

    def request(self, step: int) -> int:
        """Order an evaluation at weights of at least `step`; return its id, the same while it waits."""
        evaluations = self._state.evaluations
        for evaluation in evaluations.values():
            if evaluation.step == step and not evaluation.is_done:
                return evaluation.id
        number = self._state.num_evaluations + 1
        self._emit(ev.EvaluationRequested(number, step))
        return number

    def give(self, replica: str, version: int, evaluating: int | None) -> Evaluation | None:
        """Hand the oldest fitting order to a replica that is at work on none (`evaluating`), or None.

        An order that this replica should be at work on, but is not, is handed to it again.
        """
        versions = self._state.versions
        if evaluating is not None or version not in versions.registered:
            return None
        served_step = versions.counted_step(version)
        for evaluation in self._state.evaluations.values():
            is_free = evaluation.replica in ("", replica) and not evaluation.is_done
            if is_free and served_step >= evaluation.step:
                if not evaluation.replica:
                    self._emit(ev.EvaluationGiven(evaluation.id, replica))
                return evaluation
        return None

    def free(self, replica: str) -> None:
        """Take unfinished orders back from a replica that is gone."""
        for evaluation in self._state.evaluations.values():
            if evaluation.replica == replica and not evaluation.is_done:
                self._emit(ev.EvaluationGiven(evaluation.id, ""))

    def finish(self, number: int, version: int, metrics: Mapping[str, float]) -> bool:
        """Store a result; return False for one that nobody waits for.

        Raises:
            LedgerError: The version was never registered.
        """
        evaluation = self._state.evaluations.get(number)
        if evaluation is None or evaluation.is_done:
            return False
        if version not in self._state.versions.registered:
            raise LedgerError(f"version {version} was never registered")
        self._emit(ev.EvaluationDone(number, version, tuple(sorted(metrics.items()))))
        return True
