"""Reads the payloads of groups out of the buffer's answers.

Must never ask for anything. Invariant: what is returned are the groups that were asked for, all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.buffer.messages import Fetched, PrefetchedGroups
from asyncrl.core.errors import LedgerError, WireError
from asyncrl.core.experience import Group, decode_group
from asyncrl.core.rpc.message import Answer
from asyncrl.core.wire import Frame


def split_frames(answer: Answer[Fetched] | Answer[PrefetchedGroups]) -> list[list[Frame]]:
    """Return the frames of each group in an answer to `fetch` or `prefetch`."""
    counts = answer.message.frames_per_group
    if sum(counts) != len(answer.frames):
        raise WireError("the buffer's frames do not fit the groups that it names")
    frames = iter(answer.frames)
    return [[next(frames) for _ in range(count)] for count in counts]


def read_fetched(
    tickets: Sequence[int], answer: Answer[Fetched], known: Mapping[int, Group]
) -> dict[int, Group]:
    """Return the groups that came; those of `tickets` without frames must be `known`."""
    if lost := answer.message.lost:
        raise LedgerError(f"the payloads of tickets {list(lost)} are lost", hint="Reserve the step again")
    found = split_frames(answer)
    if len(found) != len(tickets):
        raise WireError("the buffer's frames do not fit the tickets that were fetched")
    came = {ticket: frames for ticket, frames in zip(tickets, found, strict=True) if frames}
    if any(ticket not in came and ticket not in known for ticket in tickets):
        raise WireError("the buffer left out groups that were fetched")
    return {ticket: decode_group(frames) for ticket, frames in came.items()}


@dataclass(frozen=True)
class Prefetched:
    """A payload that came ahead, of one attempt at a ticket."""

    attempt: int
    frames: list[Frame]
