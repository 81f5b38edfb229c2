"""Operations of the buffer for rollout replicas, performed by the ledger."""

from __future__ import annotations

import math
from dataclasses import asdict

from asyncrl.buffer import messages as wire
from asyncrl.buffer.ledger.tickets import Part
from asyncrl.buffer.pending_requests import RequestHandler, lease_lane
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import WireError
from asyncrl.core.rpc import Request
from asyncrl.core.rpc.message import Answer, Done
from asyncrl.core.rpc.operations import Operations


class ReplicaOps:
    """Operations of replicas. `_last_seen` is when those that evaluate last spoke, the most silent first."""

    def __init__(self, store: ExperienceStore, handler: RequestHandler) -> None:
        self._store = store
        self._ledger = store.ledger
        self._handler = handler
        self._last_seen: dict[str, float] = {}

    def add_to(self, operations: Operations) -> None:
        """Let these be handled."""
        operations.add(wire.DESCRIBE_DATA, self.describe_data)
        operations.add(wire.LEASE, self.lease)
        operations.add(wire.RENEW, self.renew)
        operations.add(wire.PUSH, self.push)
        operations.add(wire.PUSH_PARTIAL, self.push_partial)
        operations.add(wire.PUSH_TURNS, self.push_turns)
        operations.add(wire.FETCH_PARTIAL, self.fetch_partial)
        operations.add(wire.FAIL, self.fail)
        operations.add(wire.RELEASE, self.release)
        operations.add(wire.DEREGISTER, self.deregister)
        operations.add(wire.EVALUATED, self.evaluated)

    def describe_data(self, request: Request, asked: wire.DescribeData) -> Done:
        self._ledger.describe_data(asked.num_prompts, asked.digest, list(asked.sources))
        return Done()

    def lease(self, request: Request, asked: wire.Lease) -> wire.LeaseReply | None:
        self._note(asked.replica)
        if request.patience_s <= 0.0:  # it lay in the socket while the journal was away
            self._store.counters["leases_given_up"] += 1
            return wire.LeaseReply()
        if asked.held is not None:
            self._store.counters["grants_lost"] += self._ledger.keep_only(asked.replica, set(asked.held))

        def attempt() -> wire.LeaseReply | None:
            return self._grant(asked)

        lane = lease_lane(asked.version, asked.want)
        owner = ("replica", asked.replica)
        self._handler.park_until(request, attempt, wire.LeaseReply, asked.wait_s, owner, lane)
        return None

    def _grant(self, asked: wire.Lease) -> wire.LeaseReply | None:
        # An evaluation is no lease: the learner has ordered it, and a pause lets what was begun end.
        wanted = 0 if self._handler.is_paused else asked.want
        now = self._handler.clock.now()
        found = self._ledger.grant(asked.replica, asked.version, wanted, asked.evaluating, now)
        if found is None:
            return None
        grants, order = found
        if order is not None:
            self._last_seen.setdefault(asked.replica, now)
        lease_s = self._ledger.settings.lease_s
        granted = tuple(wire.LeaseGrant(**asdict(one), lease_s=lease_s) for one in grants)
        return wire.LeaseReply(granted, _order_of(order))

    def take_back(self, replica: str, granted: wire.LeaseReply) -> None:
        """Take back what `lease` granted: nobody waits for the answer any more."""
        self._ledger.release(replica, [grant.key for grant in granted.grants])
        self._store.counters["leases_given_up"] += 1

    def renew(self, request: Request, asked: wire.Renew) -> wire.Renewed:
        self._note(asked.replica)
        return wire.Renewed(
            tuple(self._ledger.renew(asked.replica, list(asked.tickets), self._handler.clock.now()))
        )

    def push(self, request: Request, asked: wire.Push) -> wire.Settled:
        self._note(asked.replica)
        return wire.Settled(self._store.push(asked.replica, asked.ticket, asked.attempt, request.frames))

    def push_partial(self, request: Request, asked: wire.PushPartial) -> wire.Settled:
        self._note(asked.replica)
        return wire.Settled(
            self._store.store_partial(asked.replica, asked.ticket, asked.attempt, request.frames)
        )

    def push_turns(self, request: Request, asked: wire.PushTurns) -> wire.Settled:
        self._note(asked.replica)
        record = asked.ticket, asked.attempt, asked.number
        return wire.Settled(self._store.turns.store(asked.replica, record, asked.versions, request.frames))

    def fetch_partial(self, request: Request, asked: wire.FetchPartial) -> Answer[wire.FetchedPartial]:
        self._note(asked.replica)
        frames = self._store.fetch_partial(asked.replica, asked.ticket, asked.attempt)
        partial = None if frames is None else self._ledger.state.tickets[asked.ticket].partial
        num_records = 0 if partial is None else partial.num_records
        return Answer(wire.FetchedPartial(frames is not None, num_records), frames or [])

    def fail(self, request: Request, asked: wire.Fail) -> Done:
        self._note(asked.replica)
        now = self._handler.clock.now()
        self._store.fail(asked.replica, asked.ticket, asked.attempt, asked.reason, asked.cause, now)
        return Done()

    def release(self, request: Request, asked: wire.Release) -> Done:
        self._note(asked.replica)
        self._ledger.release(asked.replica, list(asked.tickets))
        return Done()

    def deregister(self, request: Request, asked: wire.Deregister) -> Done:
        self.deregister_absent(asked.replica)
        return Done()

    def deregister_absent(self, replica: str) -> None:
        """Take back what a replica holds, or held before it died; grant it nothing that it waits for."""
        self._handler.end_waits(("replica", replica))
        self._ledger.deregister(replica)
        self._last_seen.pop(replica, None)

    def evaluated(self, request: Request, asked: wire.Evaluated) -> wire.NextPart:
        self._note(asked.replica)
        orders = self._ledger.evaluations
        try:
            tallies = asked.tallies()
        except WireError:
            self._store.counters["evaluations_refused"] += 1
            orders.refuse(asked.id, asked.replica, asked.version, asked.part)
            raise
        if not orders.finish(asked.id, asked.version, tallies, asked.part):
            self._store.counters["evaluations_unasked"] += 1
        return wire.NextPart(_order_of(orders.give_more(asked.id, asked.replica, asked.version)))

    @property
    def next_silence(self) -> float:
        """Time from which `expire_silent` may have work; infinite while nobody evaluates."""
        seen = next(iter(self._last_seen.values()), math.inf)
        return seen + self._ledger.settings.lease_s

    def expire_silent(self, now: float) -> bool:
        """Take evaluations back from replicas that have been silent for a lease's time."""
        lease_s = self._ledger.settings.lease_s
        for evaluation in self._ledger.state.evaluations.values():
            for replica in evaluation.holders.values():
                self._last_seen.setdefault(replica, now)
        has_silent = False
        while self._last_seen and now - (oldest := next(iter(self._last_seen.items())))[1] >= lease_s:
            del self._last_seen[oldest[0]]
            self._ledger.evaluations.free(oldest[0])
            has_silent = True
        return has_silent

    def _note(self, replica: str) -> None:
        if self._last_seen.pop(replica, None) is not None:
            self._last_seen[replica] = self._handler.clock.now()


def _order_of(part: Part | None) -> wire.EvaluationOrder | None:
    return None if part is None else wire.EvaluationOrder(*part)
