"""Composition root of the buffer service."""

from __future__ import annotations

from pathlib import Path

from asyncrl.buffer.bounds import UNTOLD, GroupBounds
from asyncrl.buffer.journals.kind import open_journal
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.config.conflicts import WITH_GREEDY
from asyncrl.core.config.prefix_caching import choose_prefix_caching
from asyncrl.core.config.rules.recorded_experts import count_expert_bytes, recorded_sizes
from asyncrl.core.config.tree import Config
from asyncrl.core.runtime.allocation import keep_freed_memory
from asyncrl.core.service import ServiceContext
from asyncrl.models.tables import read_vocab_size

_MAX_SPANS = 256
"""Versions that one trajectory can see in the worst case that memory is reserved for."""


def max_group_bytes(config: Config) -> int:
    """Return the bytes of the largest group that a replica may push, as `encode_group` makes it."""
    rollout = config.rollout
    experts = count_expert_bytes(config)
    per_token = 4 + 1 + 4 + experts  # id, mask, log-prob
    num_tokens = _most_answer_tokens(config)
    trajectory = num_tokens * per_token + 32 * min(_MAX_SPANS, num_tokens) + 64
    num_rows = rollout.group_size * (rollout.gateway.max_branches if rollout.gateway is not None else 1)
    return num_rows * trajectory + (4 + experts) * config.data.max_prompt_tokens + 1024


def _most_answer_tokens(config: Config) -> int:
    """Return the tokens of the longest trajectory after its group's prompt: the prompts of an agent's
    conversations may have little in common, and what they have not counts as observed.
    """
    has_agents = config.rollout.gateway is not None
    return config.rollout.max_tokens + has_agents * config.data.max_prompt_tokens


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
        is_shuffled=config.data.is_shuffled,
        policy=config.staleness.policy,
        max_wait_s=config.staleness.max_wait_s,
        is_ascending=config.data.curriculum is not None,
        evaluation_parts=config.eval.replicas,
        shares_prefixes=choose_prefix_caching(config)[0],
        keeps_sessions=config.rollout.gateway is not None and config.rollout.resume_partial,
    )


def group_bounds(config: Config) -> GroupBounds:
    """Return the bounds of a group of this run; `max_group_bytes` bounds its bytes.

    Without an environment a generator has its own loop (a gateway's agent, another maker's): each of its
    turns takes a token at least.
    """
    rollout = config.rollout
    models = (config.model.path, config.critic.path)
    return GroupBounds(
        prompt_tokens=config.data.max_prompt_tokens,
        answer_tokens=_most_answer_tokens(config),
        turns=rollout.max_tokens if rollout.environment is None else rollout.environment.max_turns,
        vocab_size=min(read_vocab_size(path) or UNTOLD for path in models if path is not None),
        experts=recorded_sizes(config),
    )


def build(context: ServiceContext) -> BufferService:
    """Build the service; with a file journal it goes on where the last one of this run stopped."""
    keep_freed_memory()
    config, runtime = context.config, context.runtime
    settings = ledger_settings(config)
    store = ExperienceStore(
        settings,
        open_journal(config.buffer, context.run_dir, context.tell, runtime),
        group_size=config.rollout.group_size,
        drops_constant_groups=config.algorithm.drop_constant_groups,
        now=runtime.now(),
        needs_baseline=config.algorithm.advantage in WITH_GREEDY,
        bounds=group_bounds(config),
    )
    store.ledger.breaker.names = tuple(Path(source.path).stem for source in config.data.train)
    return BufferService(store, runtime, context.bind, context.server_keys, context.is_paused)
