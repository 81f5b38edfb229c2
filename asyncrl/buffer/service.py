"""The buffer service: one thread that answers replicas and the learner.

    consumes: requests       waits for: a request, what is due next
    produces: grants, verdicts on pushes, batches       unblocked by: the same, a command, the journal

Each turn of the loop handles the messages that are there, answers parked requests that can now be
answered, commits the turn's events, and only then sends the turn's replies: acknowledged is journalled.
Invariant: nothing that a client sends ends the service; what is wrong is refused and counted.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from asyncrl.buffer.learner_ops import LearnerOps
from asyncrl.buffer.ledger.census import add_up
from asyncrl.buffer.ledger.tickets import State
from asyncrl.buffer.messages import (
    LEASE,
    STATUS,
    Lease,
    LeaseReply,
)
from asyncrl.buffer.pending_requests import QUIET_OPS, Attempt, Owner, PendingRequest, PendingRequests
from asyncrl.buffer.replica_ops import ReplicaOps
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.rpc import Limits, Request, Server
from asyncrl.core.rpc.message import Answer, Done, Message, read_message
from asyncrl.core.rpc.operations import Operations, send_answer
from asyncrl.core.runtime.clock import Clock
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.service_command import (
    AnyCommand,
    Bound,
    DeregisterReplica,
    Pause,
    PauseState,
    Tighten,
    Unpause,
    unknown_command,
)
from asyncrl.core.sockets.keys import ServerKeys
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import BufferStatus, FinishedEvaluation, PendingTickets

log = logging.getLogger(__name__)

STATUS_EVERY_S = 0.5
MAX_PARKED = 16_384
"""Of a fleet of thousands each may wait, and once more under a newer version."""
MAX_EVALUATIONS_TOLD = 64
"""The newest: a status must fit into a header, also after thousands of evaluations."""
MAX_METRICS_TOLD = 4096
"""Of all evaluations in a status."""
AWAY_PAUSE_S = 0.05
"""Between two tries to commit a turn, at least."""
SLOW_SHARE = 0.1
"""Of a lease: a turn that takes longer leaves no time to renew it."""
MAX_OUTBOX_BYTES = 64 << 20
"""Payloads that one turn answers with, about: they may be copies, read from the journal."""

Waiting = PendingRequest[Request, Message]


@dataclass(frozen=True)
class Outgoing:
    """Reply to a request once the turn is durable: an answer or an error.

    Attributes:
        given_up: From when on nobody waits for it.
    """

    request: Request
    given_up: float
    answer: Answer[Message] | AsyncrlError

    def send(self) -> None:
        if isinstance(self.answer, AsyncrlError):
            self.request.fail(self.answer)
        else:
            send_answer(self.request, self.answer)


class RequestHandler:
    """Handles requests, turn by turn. See the module."""

    def __init__(self, store: ExperienceStore, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.state, self.address = ServiceState.STARTING, ""
        self.is_paused = False
        self._retiring: list[str] = []
        self.counters: Counter[str] = Counter()
        self.wire_counters: Counter[str] = Counter()
        self._parked: PendingRequests[Request, Message] = PendingRequests()
        self._outbox: list[Outgoing] = []
        self._outbox_bytes = 0
        self._has_changed = False
        self._next_status = self._commit_tried_at = -math.inf
        self._is_status_old = True
        self._patience_noted = math.inf
        self._probes_noted = -math.inf
        self._ops = Operations("the buffer", self.answer)
        self._ops.add(STATUS, lambda _, __: self.status())
        self._replicas = ReplicaOps(store, self)
        self._replicas.add_to(self._ops)
        self.generator_ops = self._ops.names()
        LearnerOps(store, self).add_to(self._ops)
        self.refresh_status()

    def handle(self, request: Request) -> None:
        """Handle one request; its answer leaves at the end of the turn."""
        self._has_changed |= request.op not in QUIET_OPS
        self._ops.handle(request)

    def wake_at(self) -> float:
        """Return when something is due: the end of a lease, a wait or a silence, the journal, a status."""
        store, due = self.store, self._next_status if self._is_status_old else math.inf
        if not store.is_committed:
            return min(due, max(store.journal.wake_at(), self._commit_tried_at + AWAY_PAUSE_S))
        probe = store.ledger.breaker.next_probe(self._probes_noted) if self._parked else math.inf
        waits = min(self._parked.next_deadline, self._replicas.next_silence, self._patience_ends, probe)
        return min(due, waits, store.ledger.next_expiry, store.journal.wake_at())

    @property
    def _patience_ends(self) -> float:
        ends = self.store.ledger.patience_ends
        return ends if self._parked and ends != self._patience_noted else math.inf

    def tick(self, now: float) -> None:
        """End what time has ended: leases, silent evaluators, waits."""
        if self.store.is_committed:  # else nobody can renew
            self._has_changed |= self.store.ledger.expire(self.clock.now()) > 0
            self._has_changed |= self._replicas.expire_silent(self.clock.now())
            self._deregister_absent()
        if self.clock.now() >= self._patience_ends:
            self._patience_noted, self._has_changed = self.store.ledger.patience_ends, True
        if self.clock.now() >= self.store.ledger.breaker.next_probe(self._probes_noted):
            self._probes_noted, self._has_changed = self.clock.now(), True
        self.end_turn()
        self.tend_journal()
        if self._is_status_old and self.clock.now() >= self._next_status:
            self.refresh_status()

    def tend_journal(self) -> None:
        """Let the journal do what is due."""
        self.store.journal.tick(self.clock.now())

    def deregister(self, replica: str) -> None:
        """Take back what a replica held that has died; while the journal is away, when it is back."""
        self._retiring.append(replica)
        if self.store.is_committed:
            self._deregister_absent()

    def _deregister_absent(self) -> None:
        retiring, self._retiring = self._retiring, []
        for replica in retiring:
            self._replicas.deregister_absent(replica)
            self._has_changed = True

    def note_command(self) -> None:
        """Let those that wait try again: an operator has paused, unpaused or tightened."""
        self._has_changed = True

    def answer(self, request: Request, answer: Answer[Message]) -> None:
        """Send this once the turn's events are durable."""
        self._outbox.append(Outgoing(request, self._given_up(request), answer))
        self._outbox_bytes += sum(len(frame) for frame in answer.frames)

    def is_full(self) -> bool:
        """Tell whether the turn must end: its answers are large."""
        return self._outbox_bytes >= MAX_OUTBOX_BYTES

    def park_until(
        self,
        request: Request,
        attempt: Attempt,
        last: Callable[[], Message],
        wait_s: float,
        owner: Owner,
        lane: Hashable = None,
    ) -> None:
        """Answer now if possible, else when the ledger allows it, else after `wait_s`.

        Args:
            lane: Of those that are alike while no evaluation is open (`parking`).
        """
        found = attempt()
        if found is None and (len(self._parked) >= MAX_PARKED or wait_s == 0.0):
            found = last()
        if found is not None:
            self.answer(request, Answer(found))
            return
        deadline, given_up = self.clock.now() + wait_s, self._given_up(request)
        newcomer = PendingRequest(
            request, attempt, last, deadline, given_up, owner, owner if lane is None else lane
        )
        self._replace_older(newcomer)
        self._parked.add(newcomer)

    def _given_up(self, request: Request) -> float:
        return self.clock.now() + request.patience_s

    def _replace_older(self, newcomer: Waiting) -> None:
        """Answer what a restarted owner left parked: a grant must not go to a client that is gone."""
        for parked in self._parked.of(newcomer.owner):
            if parked.request.client != newcomer.request.client:
                self._end_wait(parked)

    def end_waits(self, owner: Owner) -> None:
        """Answer all that an owner left parked: it is gone, or goes, and a grant would be lost."""
        for parked in self._parked.of(owner):
            self._end_wait(parked)

    def _end_wait(self, parked: Waiting) -> None:
        self._parked.remove(parked)
        self.answer(parked.request, Answer(parked.last()))

    def end_turn(self) -> None:
        """Answer what can be answered, make the turn durable, send; without the journal, wait."""
        now = self._commit_tried_at = self.clock.now()
        self._is_status_old = True
        if self.store.is_committed:
            self._try_parked(now)
        else:
            self._take_back(now)
        if not self.store.commit(now):
            return
        self._forgive_slowness(now)
        outbox, self._outbox, self._outbox_bytes = self._outbox, [], 0
        for answer in outbox:
            answer.send()
        if outbox:
            fault_point("buffer.sent", self.store.num_turns)

    def _forgive_slowness(self, began: float) -> None:
        """Let leases start afresh after a turn that the disk held up: nobody could renew them meanwhile."""
        if self.clock.now() - began > self.store.ledger.settings.lease_s * SLOW_SHARE:
            self.counters["slow_turns"] += 1
            self.store.ledger.restart(self.clock.now())

    def _take_back(self, now: float) -> None:
        """While the journal is away, take back leases whose callers stopped waiting to hear of them.

        Else they would be held until they expire, by replicas that do not know of them.
        """
        for number, answer in enumerate(self._outbox):
            if answer.given_up <= now and (lost := _grants_in(answer.answer)) is not None:
                asked = read_message(answer.request.args, Lease, LEASE.name)
                self._replicas.take_back(asked.replica, lost)
                self._outbox[number] = replace(answer, answer=Answer(LeaseReply()))
                self._has_changed = True

    def _try_parked(self, now: float) -> None:
        has_changed, self._has_changed = self._has_changed or self.store.ledger.has_news, False
        self._parked.end_turn(
            now,
            lambda parked: self._try(parked, now),
            self._give_up,
            has_changed=has_changed,
            are_alike=lambda: not self.store.ledger.evaluations.have_free_part,
        )

    def _give_up(self, parked: Waiting) -> None:
        self._outbox.append(Outgoing(parked.request, parked.given_up, Answer(parked.last())))

    def _try(self, parked: Waiting, now: float) -> bool:
        """Answer a parked request if that is possible now; return whether it was."""
        if now >= parked.given_up:  # the wait ended while the journal was away
            self._give_up(parked)
            return True
        try:
            found = parked.attempt()
        except AsyncrlError as error:
            self._outbox.append(Outgoing(parked.request, parked.given_up, error))
            return True
        if parked.owner[0] == "learner":  # a reservation drops and issues again what others may lease
            self._has_changed |= self.store.ledger.has_news
        if found is not None:
            self._outbox.append(Outgoing(parked.request, parked.given_up, Answer(found)))
        return found is not None

    def refresh_status(self) -> None:
        """Add the status up, for readers in other threads."""
        self.last_status, self._is_status_old = self.status(), False
        self._next_status = self.clock.now() + STATUS_EVERY_S

    def status(self) -> BufferStatus:
        """Return the census, both laws' residue and what else operators ask for."""
        state = self.store.ledger.state
        census = add_up(state)
        counters = self.store.counters + self.store.journal.counters + self.counters
        placed = {f"placed/{reason}": count for reason, count in self.store.ledger.placement.counts.items()}
        evaluations = [
            FinishedEvaluation(one.id, one.step, one.version, one.metrics)
            for one in state.evaluations.values()
            if one.version is not None
        ]
        return BufferStatus(
            state=self.state,
            address=self.address,
            paused=self.is_paused,
            obstacles=self.obstacles(),
            issued=census.issued,
            trained=census.trained,
            dropped=census.dropped,
            pending=PendingTickets(**census.pending),
            prompts_drawn=census.prompts_drawn,
            given_up=census.given_up,
            open=census.open,
            residue=census.residue,
            stored_groups=state.counts[State.STORED],
            memory_bytes=state.held_bytes,
            steps_trained=state.steps_trained,
            num_prompts=state.num_prompts,
            lineage=state.versions.lineage,
            last_version=state.versions.last_number,
            token=state.token,
            leases={replica: len(held) for replica, held in state.leases.items()},
            reissues=dict(state.reissues),
            checkpoints=tuple(sorted(state.checkpoints)),
            evaluations=_newest(evaluations),
            evaluations_pending=len(state.evaluations) - len(evaluations),
            parked=len(self._parked),
            journal=self.store.journal.status(),
            counters={**counters, **placed, **self.count_wire()},
        )

    def obstacles(self) -> tuple[Obstacle, ...]:
        """Return what keeps groups from coming in: of the journal, and of data sources."""
        return (*self.store.journal.obstacles(), *self.store.ledger.breaker.obstacles())

    def count_wire(self) -> dict[str, int]:
        """Return what the server has counted."""
        return {f"wire/{name}": count for name, count in list(self.wire_counters.items())}


def _grants_in(answer: Answer[Message] | AsyncrlError) -> LeaseReply | None:
    """Return an answer that grants leases, None for any other."""
    found = answer.message if isinstance(answer, Answer) else None
    return found if isinstance(found, LeaseReply) and found.grants else None


def _newest(evaluations: Sequence[FinishedEvaluation]) -> tuple[FinishedEvaluation, ...]:
    """Return the newest evaluations, at least one, as many as fit."""
    num_told, room = 0, MAX_METRICS_TOLD
    for found in reversed(evaluations[-MAX_EVALUATIONS_TOLD:]):
        room -= len(found.metrics)
        if room < 0 and num_told:
            break
        num_told += 1
    return tuple(evaluations[len(evaluations) - num_told :])


class BufferService:
    """The experience buffer as a service of a run."""

    def __init__(
        self,
        store: ExperienceStore,
        runtime: Runtime,
        bind: str = "tcp://127.0.0.1:*",
        keys: ServerKeys | None = None,
        is_paused: bool = False,
    ) -> None:
        settings = store.ledger.settings
        limits = Limits.of_groups(settings.max_group_bytes, settings.memory_bytes)
        self._handler = RequestHandler(store, runtime)
        self._server = Server(runtime, bind, keys, limits, self._handler.generator_ops)
        store.journal.listen(lambda: self._server.call_soon(self._handler.tend_journal))
        self._handler.is_paused = is_paused
        self._handler.wire_counters = self._server.counters
        self._store = store
        self._handler.address = self._server.address
        self._handler.refresh_status()

    @property
    def address(self) -> str:
        return self._server.address

    def run(self, stop: Event) -> None:
        """Serve until `stop` is set."""
        self._handler.state = ServiceState.READY
        log.info("the buffer listens on %s", self.address)
        try:
            handler = self._handler
            # While the journal is away requests stay in their sockets: nobody could answer them.
            self._server.serve(
                handler, stop, handler.end_turn, handler.is_full, lambda: self._store.is_committed
            )
            self._handler.refresh_status()
            self._handler.state = ServiceState.ENDED
        except BaseException:  # process boundary, SystemExit too: whoever asks must see how it ended
            self._handler.state = ServiceState.FAILED
            raise
        finally:
            self._store.journal.close()

    def status(self) -> BufferStatus:
        """Return the last status: of now, or of half a second ago where something has happened since."""
        last = self._handler.last_status
        return msgspec.structs.replace(
            last,
            state=self._handler.state,
            paused=self._handler.is_paused,
            obstacles=self._handler.obstacles(),
            counters={**last.counters, **self._handler.count_wire()},  # a refused stranger makes no turn
        )

    def command(self, command: AnyCommand) -> Message:
        """Do what an operator or the supervisor asks; what is leased in a pause is still taken."""
        match command:
            case DeregisterReplica(replica):
                self._server.call_soon(partial(self._handler.deregister, replica))
                return Done()
            case Tighten(max_lag):
                self._store.ledger.tighten(max_lag)
                self._server.call_soon(self._handler.note_command)
                return Bound(self._store.ledger.max_lag)
            case Pause() | Unpause():
                self._handler.is_paused = isinstance(command, Pause)
                self._server.call_soon(self._handler.note_command)
                return PauseState(self._handler.is_paused)
        raise unknown_command(
            "the buffer", command, "It knows 'tighten', 'deregister', 'pause' and 'unpause'"
        )
