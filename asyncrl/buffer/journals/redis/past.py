"""Reader of a journal in Redis, for a buffer that takes over and for commands that only inspect.

Owns the names of a run's keys and the form of what stands under them. It writes nothing and takes
nothing over. Invariant: commits come back without a gap, or not at all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.journals.journal import Commit, unpack_commit, unpack_snapshot
from asyncrl.buffer.journals.redis.link import LinkDown, RedisLink, Refusal, explain_refusal
from asyncrl.core.errors import CheckpointError, ConfigError

Ask = Callable[..., Any]
"""Carries out one command and returns Redis' reply."""
KEYS = ("owner", "turn", "turns", "snapshot", "payloads", "format")
"""`turn` is the number of the last commit, `turns` the stream of them."""
FORMAT = 2
"""Format of the keys' contents. Format 1 had no number, and is otherwise the same."""
_PAGE = 1000
LOOKS, LOOK_AGAIN_S = 10, 0.05
"""A living buffer trims the stream behind each snapshot, some seconds apart; reading takes well below one."""


@dataclass(frozen=True)
class Past:
    """Committed state of a journal in Redis.

    Attributes:
        last_commit: The newest commit that a snapshot or the stream covers.
        values: A snapshot of the ledger, None if there is none yet.
        commits: Those after the snapshot, in order.
    """

    last_commit: int
    values: dict[str, object] | None
    commits: list[Commit]


def keys_of(run: str) -> dict[str, str]:
    """Return the run's keys by what they hold; the braces keep them together in a cluster."""
    return {name: f"asyncrl:{{{run}}}:{name}" for name in KEYS}


def refuse_newer(ask: Ask, keys: dict[str, str], label: str) -> None:
    """Raise ConfigError if a newer asyncrl has written the contents of `keys`."""
    found = int(ask("GET", keys["format"]) or 1)
    if found > FORMAT:
        raise ConfigError(
            f"the journal in Redis at {label} is of format {found}, this asyncrl reads up to {FORMAT}",
            hint="A newer asyncrl wrote it: use that one, or newer; for a new run choose another run.name",
        )


class CommitMissing(CheckpointError):
    """The stream lacks a commit that is neither in the snapshot nor the last."""


def read_past(ask: Ask, keys: dict[str, str], label: str) -> Past:
    """Return the snapshot and later commits, for the one buffer that writes there.

    Raises:
        CheckpointError: Something is missing or damaged.
    """
    covered, values = 0, None
    stored = ask("HGETALL", keys["snapshot"])
    if stored:
        fields = dict(zip(stored[::2], stored[1::2], strict=True))
        covered = int(fields[b"turn"])
        values = unpack_snapshot(fields[b"data"], fields[b"digest"].decode())
    last = max(covered, int(ask("GET", keys["turn"]) or 0))
    commits = list(_read_commits(ask, keys["turns"], covered, last))
    if len(commits) != last - covered:
        raise CommitMissing(
            f"the journal in Redis at {label} lacks commit {covered + len(commits) + 1} of {last}",
            hint="Restore it, or remove its keys to begin anew",
        )
    return Past(last, values, commits)


def _read_commits(ask: Ask, key: str, after: int, last: int) -> Iterator[Commit]:
    """Yield the commits after `after`, up to the first one that is missing."""
    number = after
    while number < last:
        page = ask("XRANGE", key, f"{number + 1}-0", f"{last}-0", "COUNT", str(_PAGE))
        if not page:
            return
        for name, values in page:
            number += 1
            if int(name.split(b"-")[0]) != number:
                return
            fields = dict(zip(values[::2], values[1::2], strict=True))
            events = unpack_commit(number, fields[b"data"], fields[b"digest"].decode())
            yield Commit(number, float(fields[b"at"]), events)


@contextlib.contextmanager
def asking(url: str) -> Iterator[tuple[Ask, str]]:
    """Connect to a Redis; the block gets a function that queries it, and its name for messages.

    Raises:
        ConfigError: It cannot be reached, or refuses the user, now or within the block.
    """
    link = RedisLink(url)
    with contextlib.closing(link):
        try:
            link.connect()
            yield link.call, link.label
        except (*LinkDown, Refusal) as error:
            refused = explain_refusal(link.label, error)
            away = ConfigError(f"Redis at {link.label} cannot be read: {error}", hint="Check buffer.url")
            raise refused or away from None


def read_living(ask: Ask, keys: dict[str, str], label: str) -> Past:
    """Return what a journal holds at which a buffer may be at work: its snapshots trim the stream meanwhile.

    Raises:
        CheckpointError: As `read_past`.
        ConfigError: A newer asyncrl wrote it.
    """
    refuse_newer(ask, keys, label)
    for _ in range(LOOKS):
        try:
            return read_past(ask, keys, label)
        except CommitMissing as error:
            missing = error
        time.sleep(LOOK_AGAIN_S)
    raise CheckpointError(missing.message, hint=f"It was so {LOOKS} times; nothing was changed") from missing
