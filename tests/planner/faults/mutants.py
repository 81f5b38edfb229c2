"""Breaks the real machines, one guard at a time, and counts the seeds until a simulated run sees it.

    python -m tests.planner.faults.mutants [NAME ...] [--seeds 400]

A guard whose loss nobody sees is a guard without a test. Prints a row per mutant: the first seed that broke a
promise, and the promise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asyncrl.buffer.learner_ops import LearnerOps
from asyncrl.buffer.ledger.evaluations import EvaluationOrders
from asyncrl.buffer.ledger.facts import VersionBook
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import State
from asyncrl.buffer.replica_ops import ReplicaOps
from asyncrl.buffer.service import Desk
from asyncrl.buffer.store import ExperienceStore
from asyncrl.control.fleet.machine import FleetMachine
from asyncrl.core.rpc import Request
from asyncrl.planner.faults.run import play
from asyncrl.planner.faults.services import evaluation as evaluation_module
from asyncrl.planner.faults.services import learner as learner_module
from asyncrl.planner.faults.services.evaluation import Evaluations, Order
from asyncrl.planner.faults.sync import receiver as receiver_module
from weight_sync.coordination.mail import ReportLog
from weight_sync.memory import shelf as shelf_module
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.shelf import Shelf
from weight_sync.protocol.members import Member
from weight_sync.protocol.peer import Allegiance, Hearing, Pin
from weight_sync.protocol.protocol import Coordination
from weight_sync.receiver import PINS

Patch = tuple[Any, str, Any]


def _hold_any_attempt(self: Ledger, replica: str, ticket: int, attempt: int) -> bool:
    found = self.state.tickets.get(ticket)
    return found is not None and found.state is State.LEASED


def _welcome_all(self: Ledger, replica: str, ticket: int, attempt: int) -> str:
    return "welcome" if self.state.tickets[ticket].state is State.LEASED else "late"


def _keep_stored(self: LedgerState, event: Any) -> None:
    kept = set(self.stored)
    _RESERVE(self, event)
    self.stored |= kept


def _answer_first(self: Desk) -> None:
    outbox, self._outbox = self._outbox, []
    for answer in outbox:
        answer.send()
    _END_TURN(self)


def _count_every_ticket(self: LedgerState, event: Any) -> None:
    _ISSUE(self, event)
    self.num_drawn += bool(event.parent)


def _open_any(self: SegmentPool, token: int) -> None:
    self.token = max(self.token, token)


def _take_any(self: Shelf, serving: int) -> Any:
    if self._committed is not None and self._taken is None:
        self._taken, self._committed = self._committed, None
    return self._taken


def _forget_lineages(self: VersionBook, number: int) -> int:
    return self.step_of(number)


def _resume_in_place(self: LedgerState, event: Any) -> None:
    """Go on as if the checkpoint had been of the last step."""
    self.is_resumed = True
    self.versions.begin_lineage()


def _never_lift(self: Member) -> None:
    fence, self.fenced_until = self.fenced_until, None
    _CATCH_UP(self)
    self.fenced_until = fence


def _book_any_lag(self: Ledger, token: int, step: int, dropped: Any = (), lag_max: int = 0) -> None:
    _TRAINED(self, token, step, dropped, min(lag_max, self.settings.max_lag))


class _OneName:
    """Has one name for all."""

    hex = "0" * 32

    @staticmethod
    def uuid4() -> type[_OneName]:
        return _OneName


class _OpenLock:
    """Keeps nobody out."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        pass


async def _answer_as_asked(self: Evaluations, order: Order, asked_number: int) -> None:
    """Hold what the replica served when it asked for what it serves."""
    await self._pin("pin")
    more: Order | None = order
    while more is not None:
        more = await self._answer_part(more, asked_number)


def _finish_at_any_version(
    self: EvaluationOrders, number: int, version: int, tallies: Any, part: int = 0
) -> bool:
    """Count every answer as one of the version that the order is answered at."""
    found = self._state.evaluations.get(number)
    served = version if found is None or found.served is None else found.served
    return _FINISH(self, number, served, tallies, part)


def _believe_pins(self: receiver_module.ReceiverProcess, request: Request) -> bool:
    return request.op not in PINS and _IS_LATE(self, request)


_FINISH, _IS_LATE = EvaluationOrders.finish, receiver_module.ReceiverProcess._is_late
_RESERVE, _ISSUE, _TRAINED = LedgerState._reserve, LedgerState._issue, Ledger.trained
_END_TURN, _CATCH_UP = Desk.end_turn, Member.catch_up


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


MUTANTS: dict[str, tuple[Patch, ...]] = {
    "the ledger takes every fencing token": ((Ledger, "check_token", _always(None)),),
    "the publisher takes every fencing token": ((SegmentPool, "open", _open_any),),
    "peers obey every coordinator": ((Allegiance, "hear", _always(Hearing.SAME)),),
    "a lease is held by everybody": ((Ledger, "holds_lease", _hold_any_attempt),),
    "a push is welcome after its lease": ((Ledger, "judge_push", _welcome_all),),
    "what is reserved stays stored": ((LedgerState, "_reserve", _keep_stored),),
    "children count as drawn prompts": ((LedgerState, "_issue", _count_every_ticket),),
    "answers leave before the turn is durable": ((Desk, "end_turn", _answer_first),),
    "lags ignore forks": ((VersionBook, "counted_step", _forget_lineages),),
    "nothing is masked, the bound is not checked": (
        (learner_module, "is_over_age", _always(False)),
        (Ledger, "trained", _book_any_lag),
    ),
    "a resume goes back to nothing": ((LedgerState, "_resume", _resume_in_place),),
    "digests are not checked": ((receiver_module, "is_right", _always(True)),),
    "the engine takes what it has again": ((Shelf, "take", _take_any),),
    "an older hello counts": ((ReportLog, "is_new", _always(True)),),
    "a late call of the learner counts": ((LearnerOps, "_check_turn", _always(None)),),
    "leases never expire": ((Ledger, "expire", _always(0)),),
    "a lost payload is not noticed": ((ExperienceStore, "_lose", _always(None)),),
    "a fence is never lifted": ((Member, "catch_up", _never_lift),),
    "rounds have no deadline": ((Coordination, "tick", _always(None)),),
    "what died is not started again": ((FleetMachine, "_start_due", _always(None)),),
    "the pin of a dead replica outlives it": ((Pin, "meet", _always(False)),),
    "a replica that is thought dead is heard": (
        (receiver_module.ReceiverProcess, "_is_past", _always(False)),
    ),
    "a new receiver uses the names of its forerunner's copies": ((shelf_module, "uuid", _OneName),),
    "what a ghost reads is written again": ((Shelf, "disown", _always(None)),),
    "a ghost is heard, and what it reads is written again": (
        (receiver_module.ReceiverProcess, "_is_past", _always(False)),
        (Shelf, "disown", _always(None)),
    ),
    "no pin ends by itself": ((Pin, "meet", _always(False)), (Pin, "end", _always(False))),
    "a pin that comes behind its unpin counts": (
        (receiver_module.ReceiverProcess, "_is_late", _believe_pins),
    ),
    "an evaluation is answered by another version": ((Evaluations, "_answer_parts", _answer_as_asked),),
    "a swap does not wait for an evaluation": ((evaluation_module, "Lock", _OpenLock),),
    "an answer of another version counts": ((EvaluationOrders, "finish", _finish_at_any_version),),
    "the part of a dead replica is not given again": ((EvaluationOrders, "free", _always(None)),),
    "silent replicas keep their parts": ((ReplicaOps, "expire_silent", _always(False)),),
}


@contextmanager
def patched(patches: tuple[Patch, ...]) -> Iterator[None]:
    """Put the mutants in place, and the originals back."""
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def find(name: str, num_seeds: int) -> tuple[int, str] | None:
    """Return the first seed at which a mutant breaks a promise, and what it breaks."""
    with patched(MUTANTS[name]):
        for seed in range(num_seeds):
            violation = play(seed).violation
            if violation is not None:
                return seed, str(violation)
    return None


def main() -> int:
    """Print a row per mutant; the exit status tells whether each was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MUTANTS))
    parser.add_argument("--seeds", type=int, default=400)
    found = parser.parse_args()
    num_missed = 0
    for name in found.names:
        seen = find(name, found.seeds)
        num_missed += seen is None
        told = f"not in {found.seeds} seeds" if seen is None else f"seed {seen[0]}: {seen[1][:110]}"
        print(f"{name:45} {told}", flush=True)
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
