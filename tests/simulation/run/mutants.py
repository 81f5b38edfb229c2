"""Mutants of whole runs."""

from __future__ import annotations

from typing import Any

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.ledger.evaluations import EvaluationOrders
from asyncrl.buffer.ledger.facts import VersionBook
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import State
from asyncrl.buffer.messages import EvaluationOrder, LeaseReply
from asyncrl.buffer.replica_ops import ReplicaOps
from asyncrl.buffer.service import RequestHandler
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core import staleness as versions
from asyncrl.core.errors import AsyncrlError, EngineError
from asyncrl.core.staleness import UNLOADED
from learner.checkpoint.store import CheckpointStore
from learner.leader.leader import Leader
from rollout_service.replica.leases import Evaluations
from rollout_service.replica.states import State as ReplicaState
from rollout_service.replica.weights import STAGED_WAIT_S, WeightSwaps
from tests.simulation.mutation import Mutant, Patch, always


def _hold_any_attempt(self: Ledger, replica: str, ticket: int, attempt: int) -> bool:
    found = self.state.tickets.get(ticket)
    return found is not None and found.state is State.LEASED


def _accept_all(self: Ledger, replica: str, ticket: int, attempt: int) -> str:
    return "accepted" if self.state.tickets[ticket].state is State.LEASED else "late"


def _keep_stored(self: LedgerState, event: Any) -> None:
    kept = set(self.stored)
    _RESERVE(self, event)
    self.stored |= kept


def _answer_first(self: RequestHandler) -> None:
    outbox, self._outbox = self._outbox, []
    for answer in outbox:
        answer.send()
    _END_TURN(self)


def _count_every_ticket(self: LedgerState, event: Any) -> None:
    _ISSUE(self, event)
    self.num_drawn += bool(event.parent)


def _forget_lineages(self: VersionBook, number: int) -> int:
    return self.step_of(number)


def _resume_in_place(self: LedgerState, event: Any) -> None:
    self.is_resumed = True
    self.versions.begin_lineage()


def _book_any_lag(self: Ledger, token: int, step: int, dropped: Any = (), lag_max: int = 0) -> None:
    _TRAINED(self, token, step, dropped, min(lag_max, self.settings.max_lag))


def _finish_at_any_version(
    self: EvaluationOrders, number: int, version: int, tallies: Any, part: int = 0
) -> bool:
    found = self._state.evaluations.get(number)
    served = version if found is None or found.served is None else found.served
    return _FINISH(self, number, served, tallies, part)


async def _answer_as_asked(self: Evaluations, order: EvaluationOrder, asked_number: int) -> None:
    """Hold what was served when the order was asked for."""
    parts, lifecycle = self._parts, self._lifecycle
    assert parts.evaluator is not None
    async with self._lock:
        lifecycle.move(ReplicaState.PINNED)
        try:
            await parts.weights.pin()
            more: EvaluationOrder | None = order
            while more is not None:
                more = await self._answer(parts.evaluator, more, asked_number)
            await lifecycle.repeat(parts.weights.unpin)
        except AsyncrlError as error:
            parts.buffer.forget_evaluation()
            await lifecycle.note("evaluation_errors", error)
        lifecycle.move(ReplicaState.READY)


async def _swap_at_any_time(self: WeightSwaps) -> None:
    """Swap without regard to an evaluation under way."""
    engine, weights = self._parts.engine, self._parts.weights
    while True:
        try:
            loaded_number = engine.serving.number if engine.is_loaded else UNLOADED
            staged = await weights.next_staged(loaded_number, STAGED_WAIT_S)
            self._lifecycle.note_change()
            if staged is not None:
                await self._swap(staged)
        except AsyncrlError as error:
            await self._lifecycle.note("sync_errors", error)


async def _report_any_load(self: WeightSwaps, staged: Any) -> None:
    """Report a load as made, however it ended."""
    try:
        await self._parts.engine.swap(staged)
        self._lifecycle.move(ReplicaState.READY)
    except EngineError:
        pass
    await self._parts.weights.report_loaded(staged.version.number, ok=True)


async def _lease_lost(
    self: ReplicaClient, version: int, want: int, wait_s: float, held: Any = None
) -> LeaseReply:
    return await _LEASE(self, version, want, wait_s, None)


def _skip_resume(self: Leader, step: int, refused: Any) -> None:
    """Take up a checkpoint's weights, and leave the ledger where it was."""


_LEASE = ReplicaClient.lease
_FINISH = EvaluationOrders.finish
_RESERVE, _ISSUE, _TRAINED = LedgerState._reserve, LedgerState._issue, Ledger.trained
_END_TURN = RequestHandler.end_turn

MUTANTS = (
    Mutant(
        "ledger_token",
        "calls of an older learner are refused",
        "zombie_learner",
        (Patch(Ledger, "check_token", always(None)),),
    ),
    Mutant(
        "lease_holder",
        "an attempt is its holder's alone, and a push after its lease is late (both guards)",
        "zombie_replica",
        (Patch(Ledger, "holds_lease", _hold_any_attempt), Patch(Ledger, "judge_push", _accept_all)),
    ),
    Mutant(
        "reserved_once",
        "what is reserved is no longer stored",
        "calm",
        (Patch(LedgerState, "_reserve", _keep_stored),),
    ),
    Mutant(
        "children",
        "a ticket with a parent is no drawn prompt",
        "rollback",
        (Patch(LedgerState, "_issue", _count_every_ticket),),
    ),
    Mutant(
        "durable_answers",
        "answers wait until their turn is durable",
        "kill_buffer",
        (Patch(RequestHandler, "end_turn", _answer_first),),
    ),
    Mutant(
        "lineages",
        "lags know of the branches that a resume abandoned",
        "rollback",
        (Patch(VersionBook, "counted_step", _forget_lineages),),
    ),
    Mutant(
        "over_age",
        "a token over the bound is masked, and the ledger checks it (both guards)",
        "general",
        (Patch(versions, "is_over_age", always(False)), Patch(Ledger, "trained", _book_any_lag)),
    ),
    Mutant(
        "resumes",
        "a resume takes the ledger back",
        "kill_learner",
        (Patch(LedgerState, "_resume", _resume_in_place),),
    ),
    Mutant(
        "leader_resumes",
        "a leader that takes up a checkpoint takes the ledger back",
        "kill_learner",
        (Patch(Leader, "_resume", _skip_resume),),
    ),
    Mutant(
        "lost_payloads",
        "a group whose payload is lost is issued again",
        "storage",
        (Patch(ExperienceStore, "_lose", always(None)),),
    ),
    Mutant(
        "checkpoints_verified",
        "a checkpoint is loaded only if its digests fit",
        "rotten",
        (Patch(CheckpointStore, "verify", always(None)),),
    ),
    Mutant(
        "evaluated_version",
        "an answer of another version does not count",
        "evaluated",
        (
            Patch(EvaluationOrders, "finish", _finish_at_any_version),
            Patch(Evaluations, "run", _answer_as_asked),
        ),
    ),
    Mutant(
        "pinned_answers",
        "a replica answers for what it serves, not for what it served when it asked",
        "evaluated",
        (Patch(Evaluations, "run", _answer_as_asked),),
    ),
    Mutant(
        "swaps_wait",
        "a swap waits for an evaluation, and a receiver is pinned meanwhile (both guards)",
        "evaluated",
        (Patch(WeightSwaps, "run", _swap_at_any_time),),
    ),
    Mutant(
        "parts_given_again",
        "a part of an evaluation that a dead replica had is given again",
        "evaluated",
        (Patch(EvaluationOrders, "free", always(None)),),
    ),
    Mutant(
        "failed_loads_told",
        "a load that failed is reported as such",
        "refusing",
        (Patch(WeightSwaps, "_swap", _report_any_load),),
    ),
    Mutant(
        "grants_lost",
        "a replica whose answer was lost says which leases it holds",
        "broken_lines",
        (Patch(ReplicaClient, "lease", _lease_lost), Patch(Ledger, "expire", always(0))),
    ),
    Mutant(
        "silent_replicas",
        "a replica that is silent loses its part of an evaluation",
        "evaluated",
        (
            Patch(ReplicaOps, "expire_silent", always(False)),
            Patch(ReplicaOps, "deregister_absent", always(None)),
        ),
    ),
)
