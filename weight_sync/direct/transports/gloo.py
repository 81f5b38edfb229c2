"""Point-to-point transfers in host memory over a private gloo group, by tag.

Touches no global state of torch.distributed, as `backends.gloo`. Observed with torch 2.13: a message travels
only once both sides have started it, so one that nobody takes holds up no other, and tags may be taken in any
order. A wait that times out closes all connections of its group, which ends every other wait of this member
within 0.02 s, and those of its peers for it. The death of a peer ends waits for it alone, and not those for a
message of which a part had come: in 10 of 25 deaths amid messages of 8 MiB a wait went on to its deadline.
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
from weight_sync.backends.sealed import SealedStore
from weight_sync.direct.transports.choice import HOST

ABORT_TAG = (1 << 31) - 1
"""Of no message."""
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
    """One member's end of a group.

    After an error it is only good for `abort` and `close`. One thread uses it, any thread may abort it.
    """

    device = HOST

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._store: SealedStore | None = None  # see SealedStore
        self._process_group: ProcessGroup | None = (
            None  # a ProcessGroupGloo, whose type stub lacks most of it
        )
        self._others: list[int] = []
        self._is_aborted = False

    def form(self, store: SealedStore, group: Group, until: float) -> None:
        """Connect to the other members, which meet in `store`.

        Raises:
            DeadlineExceeded: Not all came until `until`.
            SyncError: The rendezvous failed otherwise, or was aborted.
        """
        try:
            self._store, self._process_group = store, connect_group(store, group, self._left(until))
        except FAILURES as error:
            what = f"the group {group.membership} did not form"
            raise explain(error, self._clock.now(), until, what) from error
        self._others = [rank for rank in range(group.world) if rank != group.rank]
        if self._is_aborted:
            self.abort()
            raise SyncError("the transfer was aborted")

    def send(self, data_B: torch.Tensor, to: int, tag: int, until: float) -> Sent:
        """Start to send bytes, which stay as they are until the message was waited for.

        Raises:
            DeadlineExceeded, SyncError: As `Sent.wait`.
        """
        return self._start(data_B, to, tag, until, is_sent=True)

    def receive(self, data_B: torch.Tensor, source: int, tag: int, until: float) -> Sent:
        """Start to receive as many bytes as `source` sends with this tag."""
        return self._start(data_B, source, tag, until, is_sent=False)

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
