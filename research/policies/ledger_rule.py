"""Our policies: the real ledger as a rule of the queueing model (pure).

Owns the conversation that replicas and the learner hold with the ledger: leases, renewals, pushes,
reservations, versions and checkpoints. It decides nothing itself; which tokens are masked comes from
the version book, as in the learner.
"""

from __future__ import annotations

import math

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.events import Dropped
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.rules.learner import is_checkpoint_due, kept_checkpoints
from asyncrl.buffer.rules.replica import renewal_interval_s
from asyncrl.core.staleness import is_over_age
from research.policies.rules import Batch
from research.policies.work import Shape, Work

NUM_PROMPTS = 1_000_003
NUM_REPLICAS = 4
LEASE = 4.0
CHECKPOINT_STEPS = 20
MAX_ATTEMPTS = 3
ROUNDING = 1e-6


class LedgerRule:
    """A ledger with its replicas and its learner.

    Args:
        policy: `mask`, `drop` or `wait`.
    """

    def __init__(self, shape: Shape, policy: str) -> None:
        settings = LedgerSettings(
            run_seed=0,
            groups_per_step=shape.groups_per_step,
            max_lag=shape.max_lag,
            ready_batches=shape.ready_batches,
            memory_bytes=1 << 40,
            max_group_bytes=1,
            lease_s=LEASE,
            max_attempts=MAX_ATTEMPTS,
            policy=policy,
            max_wait_s=shape.max_wait,
        )
        self.ledger = Ledger(settings)
        self.ledger.describe_data(NUM_PROMPTS, "simulated")
        self._shape = shape
        self._token = self.ledger.open("simulated learner")
        self._version = self.ledger.register_version(self._token, 0)
        self._holders: dict[int, str] = {}
        self._num_leases = 0
        self._next_renewal = renewal_interval_s(LEASE)
        self._dropped: list[int] = []

    def admit(self, time: float) -> int | None:
        replica = f"replica-{self._num_leases % NUM_REPLICAS}"
        grants = self.ledger.lease(replica, self._version, 1, time)
        if not grants:
            return None
        self._num_leases += 1
        self._holders[grants[0].ticket] = replica
        self._read_events()
        return grants[0].ticket

    def finish(self, work: Work, time: float) -> None:
        self._renew(time)
        assert self.ledger.judge_push(self._holders.pop(work.number), work.number, 1) == "accepted"
        self.ledger.store(work.number, work.num_tokens, 1, (work.start_step + 1, self._version))
        self._read_events()

    def take(self, time: float) -> Batch | None:
        step = self.ledger.state.steps_trained
        tickets = self.ledger.reserve(self._token, step, time)
        self._read_events()
        if tickets is None:
            return None
        numbers = tuple(ticket.id for ticket in tickets)
        return Batch(numbers, self._lowest_version(self.ledger.counted_versions(tickets), step))

    def _lowest_version(self, counted: list[tuple[int, int]], step: int) -> int:
        max_lag = self._shape.max_lag
        return min(number for number, counts_as in counted if not is_over_age(step, counts_as, max_lag))

    def publish(self, lag_max: int, time: float) -> None:
        step = self.ledger.state.steps_trained
        self.ledger.trained(self._token, step, (), lag_max)
        self._version = self.ledger.register_version(self._token, step + 1)
        if is_checkpoint_due(step + 1, CHECKPOINT_STEPS):
            kept = kept_checkpoints(step + 1, (), keep=1)
            self.ledger.checkpointed(self._token, step + 1, "simulated", kept)
        self._read_events()

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def wake_time(self) -> float | None:
        ends = self.ledger.patience_ends
        return None if ends == math.inf else ends + ROUNDING

    @property
    def residue(self) -> int:
        """Residue of the ledger's accounting laws; 0 if they hold."""
        return take_census(self.ledger.state).residue

    def _renew(self, time: float) -> None:
        if time < self._next_renewal:
            return
        self._next_renewal = time + renewal_interval_s(LEASE)
        tickets = self.ledger.state.tickets
        for replica, held in list(self.ledger.state.leases.items()):
            self.ledger.renew(replica, [(number, tickets[number].attempt) for number in held], time)
        assert self.ledger.expire(time) == 0, "leases that are renewed do not expire"

    def _read_events(self) -> None:
        self._dropped += [event.ticket for event in self.ledger.drain_events() if isinstance(event, Dropped)]
