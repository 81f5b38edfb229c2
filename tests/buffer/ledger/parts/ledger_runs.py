"""Ledgers without a store, for the tests of the ledger."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import Grant, LedgerSettings

GROUP_BYTES = 4096
SETTINGS = LedgerSettings(
    run_seed=7,
    groups_per_step=2,
    max_lag=1,
    ready_batches=1,
    memory_bytes=8 * GROUP_BYTES,
    max_group_bytes=GROUP_BYTES,
    lease_s=10.0,
    max_attempts=3,
)


class Run:
    """A ledger with a learner that is open, data that is described and version 1 registered."""

    def __init__(self, **changes: object) -> None:
        self.ledger = Ledger(replace(SETTINGS, **changes))
        self.state = self.ledger.state
        self.ledger.describe_data(100, "digest")
        self.token = self.ledger.open("learner")
        self.version = self.ledger.register_version(self.token, 0)
        self.now = 0.0

    def lease(self, want: int = 1, replica: str = "a", version: int | None = None) -> list[Grant]:
        return self.ledger.lease(replica, version or self.version, want, self.now)

    def store(self, grant: Grant, version: int | None = None) -> None:
        number = version or self.version
        self.ledger.store(grant.ticket, 10, 100, (number, number))

    def fill(self, num_groups: int, replica: str = "a") -> list[int]:
        """Lease and store `num_groups` groups one by one."""
        tickets = []
        for _ in range(num_groups):
            (grant,) = self.lease(replica=replica)
            self.store(grant)
            tickets.append(grant.ticket)
        return tickets

    def train(self, dropped: tuple[tuple[int, str], ...] = ()) -> list[int]:
        """Fill, reserve and train the next step, register its weights; return its tickets."""
        step = self.state.steps_trained
        while (batch := self.ledger.reserve(self.token, step, 0.0)) is None:
            self.fill(1)
        self.ledger.trained(self.token, step, dropped)
        self.version = self.ledger.register_version(self.token, step + 1)
        return [ticket.id for ticket in batch]

    def checkpoint(self, *kept: int) -> None:
        step = self.state.steps_trained
        self.ledger.checkpointed(self.token, step, f"digest-{step}", [*kept, step])

    def reopen(self, step: int, missing: tuple[int, ...] = ()) -> None:
        """A new learner resumes at `step` and registers its weights."""
        self.token = self.ledger.open("successor")
        self.ledger.resume(self.token, step, missing)
        self.version = self.ledger.register_version(self.token, step)

    @property
    def residue(self) -> int:
        return take_census(self.state).residue
