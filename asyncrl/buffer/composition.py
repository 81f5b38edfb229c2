"""Builds the buffer service from a run's configuration."""

from __future__ import annotations

from asyncrl.buffer.journals.journal import FileJournal, Journal, MemoryJournal
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.clock import Clock, SystemClock
from asyncrl.config.tree import WITH_GREEDY, Config
from asyncrl.service import ServiceContext

_MAX_SPANS = 256
"""Versions that one trajectory can see in the worst case that memory is reserved for."""


def max_group_bytes(config: Config) -> int:
    """Return the bytes of the largest group that a replica may push, as `encode_group` makes it."""
    rollout = config.rollout
    per_token = 4 + 1 + 4  # id, mask, log-prob
    spans = 32 * min(_MAX_SPANS, rollout.max_tokens)
    trajectory = rollout.max_tokens * per_token + spans + 64
    return rollout.group_size * trajectory + 4 * config.data.max_prompt_tokens + 1024


def ledger_settings(config: Config) -> LedgerSettings:
    """Return the ledger's rules.

    Raises:
        ConfigError: The buffer's memory cannot hold two batches.
    """
    return LedgerSettings(
        run_seed=config.run.seed,
        groups_per_step=config.learner.groups_per_step,
        max_lag=config.staleness.max_lag,
        ready_batches=config.staleness.ready_batches,
        memory_bytes=config.buffer.memory_bytes,
        max_group_bytes=max_group_bytes(config),
        lease_s=config.buffer.lease_s,
        max_attempts=config.buffer.max_attempts,
        is_shuffled=config.data.shuffle,
    )


def build(context: ServiceContext, clock: Clock | None = None) -> BufferService:
    """Build the service; with a file journal it goes on where the last one of this run stopped."""
    config = context.config
    clock = clock or SystemClock()
    settings = ledger_settings(config)
    journal: Journal = MemoryJournal()
    if config.buffer.journal == "file":
        journal = FileJournal(context.run_dir / "buffer", config.buffer.fsync)
    store = ExperienceStore(
        settings,
        journal,
        group_size=config.rollout.group_size,
        drops_constant_groups=config.algorithm.drop_constant_groups,
        now=clock.now(),
        needs_baseline=config.algorithm.advantage in WITH_GREEDY,
    )
    return BufferService(store, clock, context.bind)
