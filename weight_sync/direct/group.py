"""Point-to-point transfers in host memory over a private gloo group, by tag.

Touches no global state of torch.distributed, as `backends.gloo`. Observed with torch 2.13: a message travels
only once both sides have started it, so one that nobody takes holds up no other, and tags may be taken in any
order. A wait that times out closes all connections of its group, which ends every other wait of this member
within 0.02 s, and those of its peers for it; so does the death of a peer for waits for it alone.
`ProcessGroupGloo.abort` wakes nobody, and `Work` has no abort. Hence `abort` lets a wait of its own time out;
`form` is not woken by it, and ends at its deadline. To drop an operation, or the group, waits for nothing.
Invariant: each wait ends by its deadline.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, Work

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.runtime.clock import Clock
from weight_sync.backends.contract import Group
from weight_sync.backends.gloo import FAILURES, connect_group, explain
from weight_sync.backends.rendezvous import connect_store
from weight_sync.backends.sealed import SealedStore

ABORT_TAG, GATHER_TAG = (1 << 31) - 1, (1 << 31) - 2
"""Of no message, and of those of `gather`."""
AT_ONCE = timedelta(milliseconds=1)


class Sent:
    """A message under way, to or from another member; holds its bytes until it was waited for, or dropped."""

    def __init__(self, clock: Clock, work: Work, data_B: torch.Tensor, until: float) -> None:
        self.data_B = data_B
        self._clock, self._work, self._until = clock, work, until

    def wait(self) -> None:
        """Return once it has left, or is here.

        Raises:
            DeadlineExceeded: It was not done until its deadline.
            SyncError: The other member left, or the group was aborted.
        """
        left_s = max(0.001, self._until - self._clock.now())
        try:
            self._work.wait(timedelta(seconds=left_s))
        except FAILURES as error:
            raise explain(error, self._clock.now(), self._until, "a pack did not arrive") from error


class GlooGroup:
    """One member's end of a group; who has another `secret` is in no group with it.

    After an error it is only good for `abort` and `close`. One thread uses it, any thread may abort it.
    """

    def __init__(self, clock: Clock, secret: str) -> None:
        self._clock, self._secret = clock, secret
        self._sealed: SealedStore | None = None  # see SealedStore
        self._process_group: ProcessGroup | None = (
            None  # a ProcessGroupGloo, whose type stub lacks most of it
        )
        self._others: list[int] = []
        self._is_aborted = False

    def form(self, group: Group, until: float) -> SealedStore:
        """Meet the other members; return the store that they share.

        Raises:
            DeadlineExceeded: Not all came until `until`.
            SyncError: The rendezvous failed otherwise, or was aborted.
        """
        left = self._left(until)
        try:
            store = connect_store(None, group.store_host, group.store_port, left)
            sealed = SealedStore(store, self._secret, f"direct/{group.membership}")
            self._sealed, self._process_group = sealed, connect_group(sealed, group, left)
        except FAILURES as error:
            what = f"the group {group.membership} did not form"
            raise explain(error, self._clock.now(), until, what) from error
        self._others = [rank for rank in range(group.world) if rank != group.rank]
        if self._is_aborted:
            self.abort()
            raise SyncError("the transfer was aborted")
        return sealed

    def send(self, data_B: torch.Tensor, to: int, tag: int, until: float) -> Sent:
        """Start to send bytes, which stay as they are until the message was waited for.

        Raises:
            DeadlineExceeded, SyncError: As `Sent.wait`.
        """
        return self._start(data_B, to, tag, until, is_sent=True)

    def receive(self, data_B: torch.Tensor, source: int, tag: int, until: float) -> Sent:
        """Start to receive as many bytes as `source` sends with this tag."""
        return self._start(data_B, source, tag, until, is_sent=False)

    def gather(self, data_B: torch.Tensor, until: float) -> list[torch.Tensor]:
        """Return the bytes that each member hands in, as many as this one does.

        Raises:
            DeadlineExceeded, SyncError: As `Sent.wait`.
        """
        found = {other: torch.empty_like(data_B) for other in self._others}
        moves = [self.receive(into_B, other, GATHER_TAG, until) for other, into_B in found.items()]
        moves += [self.send(data_B, other, GATHER_TAG, until) for other in self._others]
        for move in moves:
            move.wait()
        return [found.get(rank, data_B) for rank in range(len(found) + 1)]

    def _start(self, data_B: torch.Tensor, other: int, tag: int, until: float, *, is_sent: bool) -> Sent:
        self._left(until)
        process_group = self._process_group
        if process_group is None or self._is_aborted:
            raise SyncError("the group is not usable: it never formed or was aborted")
        start = process_group.send if is_sent else process_group.recv
        try:
            work = start([data_B], other, tag)
        except FAILURES as error:
            raise explain(error, self._clock.now(), until, "a pack was not sent") from error
        return Sent(self._clock, work, data_B, until)

    def abort(self) -> None:
        """Close all connections, which ends the waits of this member and of its peers; takes about 0.02 s."""
        self._is_aborted = True
        process_group, nothing = self._process_group, torch.empty(1, dtype=torch.uint8)
        for other in self._others:
            if process_group is None:
                return
            with contextlib.suppress(*FAILURES):  # it times out, or the connection was closed already
                process_group.recv([nothing], other, ABORT_TAG).wait(AT_ONCE)

    def close(self) -> None:
        """Free the group; may be called twice."""
        self._is_aborted, self._process_group = True, None

    def _left(self, until: float) -> timedelta:
        left_s = until - self._clock.now()
        if left_s <= 0:
            raise DeadlineExceeded("no time is left for the transfer")
        return timedelta(seconds=max(left_s, 0.001))
