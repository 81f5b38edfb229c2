"""Reading a journal in Redis: for the buffer that takes over, and for whoever only looks.

Owns the names of a run's keys and the form of what stands under them. It writes nothing and takes
nothing over. Invariant: turns come back without a gap, or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.journals.journal import Turn, unpack_snapshot, unpack_turn
from asyncrl.buffer.journals.redis_link import RedisLink
from asyncrl.errors import CheckpointError

Ask = Callable[..., Any]
"""Carries out one command and returns Redis' reply."""
KEYS = ("owner", "turn", "turns", "snapshot", "payloads")
_PAGE = 1000


@dataclass(frozen=True)
class Past:
    """What was committed.

    Attributes:
        last_turn: The newest turn that a snapshot or the stream covers.
        values: A snapshot of the ledger, None if there is none yet.
        turns: Those after the snapshot, in order.
    """

    last_turn: int
    values: dict[str, Any] | None
    turns: list[Turn]


def keys_of(run: str) -> dict[str, str]:
    """Return the run's keys by what they hold; the braces keep them together in a cluster."""
    return {name: f"asyncrl:{{{run}}}:{name}" for name in KEYS}


def read_past(ask: Ask, keys: dict[str, str], label: str) -> Past:
    """Return the snapshot and what came after it.

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
    turns = list(_read_turns(ask, keys["turns"], covered, last))
    if len(turns) != last - covered:
        raise CheckpointError(
            f"the journal in Redis at {label} lacks turn {covered + len(turns) + 1} of {last}",
            hint="Restore it, or remove its keys to begin anew",
        )
    return Past(last, values, turns)


def _read_turns(ask: Ask, key: str, after: int, last: int) -> Iterator[Turn]:
    """Yield the turns after `after`, up to the first one that is missing."""
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
            events = unpack_turn(number, fields[b"data"], fields[b"digest"].decode())
            yield Turn(number, float(fields[b"at"]), events)


def read_run(url: str, run: str) -> Past:
    """Return what a run's journal holds, whether or not a buffer is at work on it.

    Raises:
        CheckpointError: As `read_past`.
        LinkDown: Redis cannot be reached.
    """
    link = RedisLink(url)
    with contextlib.closing(link):
        link.connect()
        return read_past(link.call, keys_of(run), link.label)
