"""Contract of every transport.

A transport belongs to one membership: a numbered, ordered set of members with the publisher as rank
0. It is used by one thread at a time, except `abort`, which any thread may call. After any error it is
broken and only good for `close`. Variants: `gloo`, where the members of a group meet, and `folder`, where
each member reads by itself what the publisher has stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.core.errors import SyncError


class DigestMismatch(SyncError):
    """A bucket's bytes differ from what the learner wrote."""


@dataclass(frozen=True)
class Group:
    """One membership as a member sees it.

    Attributes:
        membership: Number, never reused while the store lives.
        rank: 0 is the publisher.
        world: Number of members, the publisher included.
        store_host: Host of the publisher's store.
        store_port: Its port.
        folder: Place of the publisher in `weight_sync.folder`; empty if the members meet over gloo.
    """

    membership: int
    rank: int
    world: int
    store_host: str
    store_port: int
    folder: str = ""


class Broadcast(Protocol):
    """A broadcast under way. It is waited for once, also if one that was started before it has failed."""

    def wait(self) -> None:
        """Return once it is done; raises as `Transport.broadcast` does."""


class Transport(Protocol):
    """Broadcasts buckets within one membership. `until` is a time of the injected clock."""

    def form(self, group: Group, until: float) -> None:
        """Meet the other members.

        Raises:
            DeadlineExceeded: Not all came until `until`.
            SyncError: The rendezvous failed otherwise.
        """

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> Broadcast:
        """Start what `broadcast` does; several may be under way, which every member starts in the same order.

        The bucket is not to be touched before it was waited for. `name` is of its content: equal ones are
        stored once by a transport that stores.

        Raises:
            DeadlineExceeded: No time is left.
            SyncError: The transport is broken already.
        """

    def broadcast(self, bucket: torch.Tensor, until: float, name: str = "") -> None:
        """Send (rank 0) or receive `bucket`, a contiguous uint8 tensor in host memory.

        Raises:
            DeadlineExceeded: It was not done until `until`.
            SyncError: A member left, or the transport was aborted; `StoreError` of its store.
        """

    def abort(self) -> None:
        """Give up what is going on, as far as the backend can; never blocks."""

    def close(self) -> None:
        """Free the transport; may be called twice."""
