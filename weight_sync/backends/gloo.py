"""Broadcast over a private gloo group in host memory.

Touches no global state of torch.distributed, so it can live beside an engine's or a learner's own
groups. Observed with torch 2.13: `abort` does not wake a waiter, and a peer that was stopped is only
noticed by a timeout. Hence each operation's own timeout is the time left until the deadline. Destroying
a group waits for its operation too (seen: until its deadline), so the thread that waits for the
operation anyway does that, and never the one that aborts.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, DistError, ProcessGroupGloo, Store, TCPStore

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.runtime.clock import Clock
from weight_sync.backends.contract import Group
from weight_sync.backends.rendezvous import connect_store, own_address
from weight_sync.backends.sealed import SealedStore

LOOPBACK = "127.0.0.1"
GRACE_S = 0.1
"""Its own timeout ends an operation; a wait that ended before it would leave the operation running."""
FAILURES = (RuntimeError, DistError, ValueError, OSError)


class GlooTransport:
    """The gloo side of `contract.Transport`; who has another `secret` is in no group with it."""

    def __init__(self, clock: Clock, secret: str, store: TCPStore | None = None) -> None:
        self._clock = clock
        self._secret = secret
        self._store = store
        self._rendezvous: SealedStore | None = None
        self._process_group: Any = None  # a ProcessGroupGloo, whose type stub lacks most of it
        self._is_aborted = False

    def form(self, group: Group, until: float) -> None:
        left = self._left(until, "form a group")
        try:
            store = connect_store(self._store, group.store_host, group.store_port, left)
            self._rendezvous = SealedStore(store, self._secret, f"membership/{group.membership}")
            self._process_group = connect_group(self._rendezvous, group, left)
        except FAILURES as error:
            raise explain(
                error, self._clock.now(), until, f"membership {group.membership} did not form"
            ) from error

    def broadcast(self, bucket: torch.Tensor, until: float, name: str = "") -> None:
        self.start(bucket, until, name).wait()

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> _Broadcast:
        process_group = self._process_group
        if process_group is None or self._is_aborted:
            raise SyncError("the gloo group is not usable: it never formed or was aborted")
        left = self._left(until, "broadcast")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, left
        try:
            return _Broadcast(process_group, process_group.broadcast([bucket], options), self._clock, until)
        except FAILURES as error:
            raise explain(error, self._clock.now(), until, "a broadcast failed") from error
        finally:
            del process_group  # an error's traceback would keep it

    def abort(self) -> None:
        self._is_aborted = True

    def close(self) -> None:
        self._is_aborted = True
        self._process_group = None

    def _left(self, until: float, what: str) -> timedelta:
        left_s = until - self._clock.now()
        if left_s <= 0:
            raise DeadlineExceeded(f"no time is left to {what}")
        return timedelta(seconds=max(left_s, 0.001))


class _Broadcast:
    """The gloo side of `contract.Broadcast`.

    Holds the group until the operation has ended: whoever drops the last reference waits for that.
    """

    def __init__(self, process_group: Any, work: Any, clock: Clock, until: float) -> None:
        self._process_group = process_group
        self._work = work
        self._clock = clock
        self._until = until

    def wait(self) -> None:
        left_s = max(0.0, self._until - self._clock.now())
        try:
            self._work.wait(timedelta(seconds=left_s + GRACE_S))
        except FAILURES as error:
            raise explain(error, self._clock.now(), self._until, "a broadcast failed") from error
        finally:
            self._process_group = self._work = None


def explain(error: Exception, now: float, until: float, what: str) -> SyncError | DeadlineExceeded:
    """Return the error of `what`, which failed at `now` and had time until `until`."""
    first_line = str(error).strip().split("\n")[0][:200]
    if now >= until - 0.05:
        return DeadlineExceeded(f"{what} in time: {first_line}")
    return SyncError(f"{what}: {first_line}")


def connect_group(store: Store, group: Group, timeout: timedelta) -> Any:
    """Return a gloo group of the members that meet in `store`."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # Named, because the host's name may resolve to an address that nobody reaches, or strangers do.
    options._devices = [gloo.create_device(hostname=own_address(group.store_host))]
    return gloo(store, group.rank, group.world, options)
