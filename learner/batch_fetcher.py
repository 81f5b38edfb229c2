"""Fetcher of reserved tickets' payloads, by id: each share of a batch once, and only trainable groups.

The ranks that train one share together, those of one copy of the model, hand it on among themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from asyncrl.buffer.client import LearnerClient
from asyncrl.core import wire
from asyncrl.core.experience import Group, decode_group, encode_group

log = logging.getLogger(__name__)


class Source(Protocol):
    """Source of a step's groups."""

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets`, under the leader's fencing token."""


class BatchFetcher:
    """One rank's connection to the buffer.

    Args:
        prefetches: While a batch is trained, let as many of the next groups travel ahead. Only where a
            share is the whole batch it is known which they will be.
    """

    def __init__(self, client: LearnerClient, prefetches: bool = False) -> None:
        self._client = client
        self._prefetches = prefetches

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets`, under the leader's fencing token."""
        if not tickets:
            return []
        self._client.token = token
        return self._client.fetch(tickets, prefetch=len(tickets) if self._prefetches else 0)


class Share(Protocol):
    """Ranks that train one share of a batch, `learner.ranks`."""

    @property
    def is_leader(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    def share_bytes(self, data: bytes | None) -> bytes:
        """Return what the leader hands in."""


class SharedFetcher:
    """A source for all ranks of one share: their leader fetches it, and hands it to the others. Collective.

    Args:
        source: The leader's; the others ask theirs for nothing.
    """

    def __init__(self, source: Source, share: Share) -> None:
        self._source, self._share = source, share

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets`, under the leader's fencing token."""
        if not self._share.is_leader:
            return unpack_groups(self._share.share_bytes(None))
        groups = self._source.fetch(token, tickets)
        if self._share.world_size > 1:
            self._share.share_bytes(pack_groups(groups))
        return groups


def pack_groups(groups: Sequence[Group]) -> bytes:
    """Return groups as bytes."""
    encoded = [encode_group(group) for group in groups]
    header = wire.pack_header({"sizes": [[len(frame) for frame in frames] for frames in encoded]})
    parts = [len(header).to_bytes(8, "little"), header, *(frame for frames in encoded for frame in frames)]
    return b"".join(parts)


def unpack_groups(data: bytes) -> list[Group]:
    """Return the groups in `data`; their arrays are views of it."""
    view = memoryview(data)
    at = 8 + int.from_bytes(view[:8], "little")
    groups = []
    for sizes in wire.unpack_header(view[8:at], max_bytes=at)["sizes"]:
        frames = []
        for size in sizes:
            frames.append(view[at : at + size])
            at += size
        groups.append(decode_group(frames))
    return groups


class FittingGroups:
    """A source without the groups that have a row longer than a microbatch: their tickets are dropped.

    The buffer refuses such rows. A journal may hold one of a run that had other limits, and the same batch
    comes again at every resume, so an error here would end the run for good.
    """

    def __init__(self, source: Source, max_tokens: int) -> None:
        self._source, self._max_tokens = source, max_tokens
        self._left_out: list[int] = []

    def fetch(self, token: int, tickets: Sequence[int]) -> list[Group]:
        """Return the groups of `tickets` that fit, under the leader's fencing token."""
        groups = []
        for group in self._source.fetch(token, tickets):
            if group.longest_row <= self._max_tokens:
                groups.append(group)
                continue
            self._left_out.append(group.ticket)
            log.warning(
                "ticket %d is dropped: a row of %d tokens does not fit a microbatch of %d",
                group.ticket,
                group.longest_row,
                self._max_tokens,
            )
        return groups

    def take_left_out(self) -> list[int]:
        """Return the tickets that were left out since the last call."""
        left_out, self._left_out = self._left_out, []
        return left_out
