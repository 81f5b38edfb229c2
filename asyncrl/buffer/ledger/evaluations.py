"""Evaluation orders of the ledger: each is cut into parts, which are handed to replicas (pure).

Owns the assignment of parts to replicas. The first replica whose weights have seen enough steps fixes the
version of the order; its parts go to all replicas that serve that version, one at a time each. A part is free
again when its replica deregisters or falls silent. If no replica works on an order, and one that
could serves a newer version, the order begins anew there.

Invariant: the parts of a result were answered at one version, each counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import Evaluation, Part
from asyncrl.core.errors import LedgerError
from asyncrl.core.metrics.tallies import Tally, add_up, conclude

MAX_OPEN = 64
"""Orders that are not done: a lease looks at each."""
REFUSED = "val-aux/num_refused"
"""Parts without a usable result. The other parts are no figure of the whole, so they are dropped."""


class EvaluationOrders:
    """Commands on evaluations, part of the ledger.

    Args:
        emit: Applies an event and keeps it for the journal.
    """

    def __init__(self, state: LedgerState, emit: Callable[[ev.Event], None]) -> None:
        self._state = state
        self._emit = emit

    @property
    def have_free_part(self) -> bool:
        """Whether a part of an order waits for a replica."""
        return any(one.next_free() is not None for one in self._open())

    def request(self, step: int) -> int:
        """Order an evaluation at weights of at least `step`; return its id, the same while it waits.

        With `MAX_OPEN` orders open the oldest that nobody has begun is skipped: late as it is, its answers
        would be those of a newer one.
        """
        waiting = self._open()
        for evaluation in waiting:
            if evaluation.step == step:
                return evaluation.id
        if len(waiting) >= MAX_OPEN:
            unbegun = [one for one in waiting if one.served is None]
            self._emit(ev.EvaluationSkipped((unbegun or waiting)[0].id))
        number = self._state.num_evaluations + 1
        self._emit(ev.EvaluationRequested(number, step, self._state.settings.evaluation_parts))
        return number

    def give(self, replica: str, version: int, evaluating: int | None) -> Part | None:
        """Hand a part of the oldest fitting order to a replica that works on none, or return None.

        A part that this replica should work on, but does not, is handed to it again. A call may have
        waited while the replica went on: one of an older version than its part's is late and changes
        nothing; one of a newer version says that the replica has let go of it.

        Args:
            version: Served by the replica. evaluating: The order that it works on.
        """
        versions = self._state.versions
        if evaluating is not None or version not in versions:
            return None
        for evaluation in self._open():
            held = evaluation.part_of(replica)
            if held is None:
                continue
            if evaluation.served is not None and version <= evaluation.served:
                return self._part(evaluation, held) if version == evaluation.served else None
            self._emit(ev.EvaluationGiven(evaluation.id, "", held, evaluation.served))
        served_step = versions.counted_step(version)
        for evaluation in self._open():
            if served_step >= evaluation.step and self._is_open_at(evaluation, version):
                return self._give_free(evaluation, replica, version)
        return None

    def give_more(self, number: int, replica: str, version: int) -> Part | None:
        """Hand another part of an order to a replica that has finished one, or return None."""
        evaluation = self._state.evaluations.get(number)
        if evaluation is None or evaluation.is_done or evaluation.served != version:
            return None
        held = evaluation.part_of(replica)
        if held is not None:
            return self._part(evaluation, held)
        return None if evaluation.next_free() is None else self._give_free(evaluation, replica, version)

    def _is_open_at(self, evaluation: Evaluation, version: int) -> bool:
        """Tell whether a replica of `version` can help: numbers only rise, so no order begins anew below."""
        if evaluation.served in (None, version):
            return evaluation.next_free() is not None
        assert evaluation.served is not None, "it is neither None nor this version"
        return version > evaluation.served and not evaluation.holders

    def _give_free(self, evaluation: Evaluation, replica: str, version: int) -> Part:
        if evaluation.served not in (None, version):
            self._emit(ev.EvaluationRestarted(evaluation.id))
        free = evaluation.next_free()
        assert free is not None, "a part is left, or all are again"
        self._emit(ev.EvaluationGiven(evaluation.id, replica, free, version))
        return self._part(evaluation, free)

    @staticmethod
    def _part(evaluation: Evaluation, part: int) -> Part:
        return Part(evaluation.id, evaluation.step, part, evaluation.num_parts)

    def free(self, replica: str) -> None:
        """Take unfinished parts back from a replica that is gone."""
        for evaluation in self._open():
            held = evaluation.part_of(replica)
            if held is not None:
                self._emit(ev.EvaluationGiven(evaluation.id, "", held, evaluation.served))

    def finish(self, number: int, version: int, tallies: Mapping[str, Tally], part: int = 0) -> bool:
        """Store the result of a part, and with the last one that of the order.

        Returns:
            False for a result that is not expected: of an order that is done or began anew at another
            version, or of a part that is done.

        Raises:
            LedgerError: The version was never registered.
        """
        evaluation = self._state.evaluations.get(number)
        if evaluation is None or evaluation.is_done:
            return False
        if version not in self._state.versions:
            raise LedgerError(f"version {version} was never registered")
        is_wanted = part not in evaluation.results and 0 <= part < evaluation.num_parts
        if not is_wanted or evaluation.served not in (None, version):
            return False
        rows = tuple((name, *tally) for name, tally in sorted(tallies.items()))
        if len(evaluation.results) + 1 < evaluation.num_parts:
            self._emit(ev.EvaluationPartDone(number, part, version, rows))
        else:
            sums = add_up([*evaluation.results.values(), tallies])
            whole = conclude({REFUSED: sums[REFUSED]} if REFUSED in sums else sums)
            self._emit(ev.EvaluationDone(number, version, tuple(sorted(whole.items()))))
        return True

    def refuse(self, number: int, replica: str, version: int, part: int) -> None:
        """End a part whose result cannot be used, if this replica holds it: tried again it is the same."""
        evaluation = self._state.evaluations.get(number)
        if evaluation is None or evaluation.served != version or evaluation.holders.get(part) != replica:
            return
        self.finish(number, version, {REFUSED: Tally(0, 1.0)}, part)

    def _open(self) -> list[Evaluation]:
        return [one for one in self._state.evaluations.values() if not one.is_done]
