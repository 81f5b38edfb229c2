"""A run's place in a Redis: the server that holds it, its keys there, and reading them beside a buffer.

Owns which keys of a Redis are a run's: they are named by a key that the run's folder keeps, so that they are
found where the folder is moved. Invariant: a folder that is a copy never writes to the original's keys.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from asyncrl.buffer.journals.kind import NUM_NEWEST, FindPayloads, PayloadKey, Scan
from asyncrl.buffer.journals.payload_index import PayloadIndex
from asyncrl.buffer.journals.records import TURNS_FROM, read_frames, read_group
from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.journals.redis.link import LinkDown, RedisLink, explain_refusal, find_server
from asyncrl.buffer.journals.redis.past import Ask, asking, keys_of, read_living
from asyncrl.buffer.journals.redis.server import START_DEADLINE_S, RedisServer
from asyncrl.core.config.tree import BufferSection
from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import Group
from asyncrl.core.files.durable import replace_text
from asyncrl.core.obstacle import Tell
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.wire import Frame

CHECK_DEADLINE_S = 1.0
CONNECT_PATIENCE_S = 5.0
"""Time that the opening waits for a Redis that has just been started, before it says so."""
REDIS_PATIENCE_S = 0.5
"""Time that a commit waits for Redis; the next commits see whether it answers."""
KEY_FILE = Path("buffer", "redis_key")
"""In a run's folder: its key in Redis, and on a second line the path at which it was last opened."""


def check_redis(section: BufferSection, run_dir: Path) -> None:
    """Check that Redis answers, or can be started, and is not that of a run whose copy this folder is.

    Raises:
        ConfigError: It cannot be used.
    """
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


def open_redis(section: BufferSection, run_dir: Path, tell: Tell, runtime: Runtime | None) -> RedisJournal:
    """Open the journal; a private server is started with it and stopped when it closes."""
    if section.redis_url is not None:
        url = expand_variables(section.redis_url)
        return RedisJournal(lambda: url, _claim_key(run_dir, is_shared=True), runtime, tell=tell)
    server = _private_server(section, run_dir)
    server.ensure(CONNECT_PATIENCE_S)

    def ensured_url() -> str:
        server.ensure(REDIS_PATIENCE_S)
        return server.url

    key = _claim_key(run_dir, is_shared=False)
    return RedisJournal(
        ensured_url, key, runtime, connect_deadline_s=START_DEADLINE_S, on_close=server.stop, tell=tell
    )


@contextlib.contextmanager
def scan_redis(section: BufferSection, run_dir: Path) -> Iterator[Scan]:
    """Read the past from the newest snapshot on; a private server that has ended is started for it."""
    with _reachable(section, run_dir) as url, asking(url) as (ask, label):
        keys = keys_of(run_key(run_dir))
        past = read_living(ask, keys, label)
        yield Scan(past.values, past.commits, _payloads_in(ask, keys["payloads"]))


def _payloads_in(ask: Ask, key: str) -> FindPayloads:
    """Return a finder of payloads in the hash `key` of a Redis that `ask` reaches."""

    def find(wanted: Collection[PayloadKey]) -> Mapping[PayloadKey, Sequence[Frame]]:
        index = PayloadIndex(ask("HKEYS", key))
        found: dict[PayloadKey, list[bytes]] = {}
        for ticket, attempt in wanted:
            name = index.find(ticket, attempt)
            record = None if name is None else ask("HGET", key, name)
            frames = None if record is None else read_frames(record, ticket, attempt)
            if frames is not None:
                found[ticket, attempt] = frames
        return found

    return find


def read_newest(section: BufferSection, run_dir: Path) -> list[Group]:
    """Return the newest groups, by ticket. A private server that has ended stays so, and is a ConfigError."""
    url = None if section.redis_url is None else expand_variables(section.redis_url)
    if url is None:
        server = _private_server(section, run_dir)
        if server.pid is None:
            raise ConfigError("the run's Redis does not run")
        url = server.url
    key = keys_of(run_key(run_dir))["payloads"]
    with asking(url) as (ask, _):
        found = (tuple(map(int, name.split(b":"))) for name in ask("HKEYS", key))
        names = sorted((name for name in found if name[1] < TURNS_FROM), reverse=True)
        records = [(name, ask("HGET", key, ":".join(map(str, name)))) for name in names[:NUM_NEWEST]]
    groups = (read_group(record, name[0], name[1]) for name, record in records if record is not None)
    return [group for group in groups if group is not None]


def _private_server(section: BufferSection, run_dir: Path) -> RedisServer:
    return RedisServer(run_dir.absolute() / "buffer" / "redis", section.fsync)


@contextlib.contextmanager
def _reachable(section: BufferSection, run_dir: Path) -> Iterator[str]:
    """Yield the URL of the run's Redis; its own server is started for as long if it has ended."""
    if section.redis_url is not None:
        yield expand_variables(section.redis_url)
        return
    server = _private_server(section, run_dir)
    was_started = server.ensure()
    try:
        yield server.url
    finally:
        if was_started:
            server.stop()


def run_key(run_dir: Path) -> str:
    """Return the run's name in Redis.

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
