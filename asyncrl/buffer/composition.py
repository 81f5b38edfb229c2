"""Builds the buffer service from a run's configuration."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import xxhash

from asyncrl.buffer.bounds import UNTOLD, GroupBounds
from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.journals.journal import Journal, MemoryJournal
from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.journals.redis.link import LinkDown, RedisLink, explain_refusal, find_server
from asyncrl.buffer.journals.redis.server import START_DEADLINE_S, RedisServer
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.config.conflicts import WITH_GREEDY
from asyncrl.core.config.tree import BufferSection, Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.files.durable import replace_text
from asyncrl.core.obstacle import Tell, tell_nobody
from asyncrl.core.runtime.allocation import keep_freed_memory
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.service import ServiceContext

_MAX_SPANS = 256
"""Versions that one trajectory can see in the worst case that memory is reserved for."""
CHECK_DEADLINE_S = 1.0
CONNECT_PATIENCE_S = 5.0
"""Time that the opening waits for a Redis that has just been started, before it says so."""
REDIS_PATIENCE_S = 0.5
"""Time that a turn waits for Redis; the next turns see whether it answers."""
KEY_FILE = Path("buffer", "redis_key")
"""In a run's folder: its key in Redis, and on a second line the path at which it was last opened."""


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
        is_shuffled=config.data.is_shuffled,
        policy=config.staleness.policy,
        max_wait_s=config.staleness.max_wait_s,
        is_ascending=config.data.curriculum is not None,
        evaluation_parts=config.eval.replicas,
    )


def group_bounds(config: Config) -> GroupBounds:
    """Return what a group of this run may be; `max_group_bytes` bounds its bytes.

    Without an environment a generator has its own loop (a gateway's agent, another maker's): each of its
    turns takes a token at least.
    """
    rollout = config.rollout
    models = (config.model.path, config.critic.path)
    return GroupBounds(
        prompt_tokens=config.data.max_prompt_tokens,
        answer_tokens=rollout.max_tokens,
        turns=rollout.max_tokens if rollout.environment is None else rollout.environment.max_turns,
        vocab_size=min(read_vocab_size(Path(path)) or UNTOLD for path in models if path is not None),
    )


def check_redis(section: BufferSection, run_dir: Path) -> None:
    """Check that the Redis of `section` can be used by the run in `run_dir`, from here and now.

    It answers, or there is one to start, and it is not that of a run whose folder this is a copy of.

    Raises:
        ConfigError: It cannot.
    """
    if section.journal != "redis":
        return
    if section.redis_url is None:
        find_server()
        return
    _refuse_copy(run_dir)
    link = RedisLink(expand_variables(section.redis_url), CHECK_DEADLINE_S)
    try:
        link.connect()
    except LinkDown as error:
        refused = explain_refusal(link.label, error)
        what = f"Redis at {link.label} cannot be reached: {error}"
        raise refused or ConfigError(what, hint="Start it, or check buffer.url") from None
    finally:
        link.close()


def open_journal(
    section: BufferSection, run_dir: Path, tell: Tell = tell_nobody, runtime: Runtime | None = None
) -> Journal:
    """Open the journal of the run in `run_dir`.

    Args:
        tell: Told what the opening waits for.
        runtime: Of the process; who only reads needs none.

    Raises:
        ConfigError: It cannot be opened or reached.
    """
    folder = run_dir.absolute() / "buffer"
    if section.journal == "none":
        return MemoryJournal()
    if section.journal == "file":
        return FileJournal(folder, section.fsync, runtime=runtime)
    if section.redis_url is not None:
        url = expand_variables(section.redis_url)
        return RedisJournal(lambda: url, _claim_key(run_dir, is_shared=True), runtime, tell=tell)
    server = RedisServer(folder / "redis", section.fsync)

    server.ensure(CONNECT_PATIENCE_S)

    def ensured_url() -> str:
        server.ensure(REDIS_PATIENCE_S)
        return server.url

    key = _claim_key(run_dir, is_shared=False)
    return RedisJournal(
        ensured_url, key, runtime, connect_deadline_s=START_DEADLINE_S, on_close=server.stop, tell=tell
    )


def read_vocab_size(model: Path) -> int | None:
    """Return how many tokens the model in this folder knows, None if its `config.json` does not say."""
    try:
        table = json.loads((model / "config.json").read_text())
        size = table.get("vocab_size") or table.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def run_key(run_dir: Path) -> str:
    """Return what names the run in Redis.

    It is made of the folder's first path, so that a service on another machine finds it by the same one, and
    kept in the folder, so that it stays where the folder is moved.
    """
    kept = _kept_key(run_dir)
    if kept is not None:
        return kept[0]
    return f"{run_dir.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(run_dir.absolute()))[:8]}"


def _claim_key(run_dir: Path, *, is_shared: bool) -> str:
    """Return `run_key`, kept in the folder from now on.

    Args:
        is_shared: Whether the Redis is also that of a folder that this one may be a copy of.

    Raises:
        ConfigError: It is a copy, and the folder that it was made of is still there.
    """
    if is_shared:
        _refuse_copy(run_dir)
    key, here = run_key(run_dir), run_dir.absolute()
    if _kept_key(run_dir) != (key, here):
        path = run_dir / KEY_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, f"{key}\n{here}\n", 0o600)
    return key


def _refuse_copy(run_dir: Path) -> None:
    kept, here = _kept_key(run_dir), run_dir.absolute()
    if kept is None or _is_same(kept[1], here):
        return
    other = _kept_key(kept[1])
    if other is not None and other[0] == kept[0]:
        raise ConfigError(
            f"{here} is a copy of {kept[1]}, whose journal in Redis it would write to",
            hint="Go on with that one, or remove it if this one is to take its place",
        )


def _kept_key(run_dir: Path) -> tuple[str, Path] | None:
    """Return the key in Redis that the folder keeps, and its path when it was last opened, if it does."""
    try:
        key, path = (run_dir / KEY_FILE).read_text().splitlines()
    except (OSError, ValueError):
        return None
    return key, Path(path)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def expand_variables(url: str) -> str:
    """Replace every `${NAME}` by the environment's NAME, so that passwords need not stand in files.

    Raises:
        ConfigError: The environment has no NAME.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(
                f"buffer.url: the environment has no variable {found[1]}", hint="Export it before the start"
            )
        return os.environ[found[1]]

    return re.sub(r"\$\{(\w+)\}", value, url)


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
    return BufferService(store, runtime, context.bind, context.server_keys, context.is_paused)
