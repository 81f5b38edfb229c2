"""Point-to-point transfers between GPUs over a private NCCL group, in waves. Not run on a GPU.

Touches no global state of torch.distributed. NCCL has no tags: the n-th send of a pair meets its n-th
receive, and both hold up what their streams are given after them. Hence all messages of a wave are one group
call on one communicator, within which they meet in any order. Nothing but an abort ends one whose peer never
comes: no wait has a timeout, a dead peer may go unseen, and after an abort what was under way looks done.
The watcher
  consumes: deadlines    waits for: an abort, here or told in the store by another member; the deadline
  unblocked by: `abort`, `close`, the clock    produces: the abort of the communicator, told in the store
Invariants: tensors of a wave are held until it or its abort has ended; a wave counts as done only without an
abort; torch's own watchdog, which would end the process, is off for this group.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import torch
from torch.distributed import distributed_c10d

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.runtime.interface import Runtime
from weight_sync.backends.contract import Group
from weight_sync.backends.gloo import FAILURES, explain
from weight_sync.backends.sealed import SealedStore

log = logging.getLogger(__name__)

ABORTED = "aborted"
"""Key in the group's store, once a member has aborted."""
WATCH_S, IDLE_S, POLL_S = 0.5, 60.0, 0.0002
"""Between looks for the abort of another member, while waves travel and else, and for the end of a wave."""
NO_TIMEOUT = timedelta(days=1)
"""Of torch's, whose end would be one of the process or the communicator: the watcher has deadlines."""
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog neither aborts nor ends the process
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does the thread that watches the watchdog
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",  # [s] for which an abort may wait for a communicator that forms
}
"""Read by torch when a process group is made; the process's own ones were made before, with other values."""
MAX_CTAS = 8
"""Blocks of the GPU that a wave takes: generation and training go on beside it."""


class Work(Protocol):
    """The part that is used of torch's."""

    def is_completed(self) -> bool: ...


class ProcessGroup(Protocol):
    """The part that is used of a ProcessGroupNCCL, whose type stub lacks it."""

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def _start_coalescing(self) -> None: ...

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> object: ...

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> object: ...

    def _end_coalescing(self) -> Work: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class Message:
    """Bytes on the GPU, and the member that they go to, or come from."""

    data_B: torch.Tensor
    other: int
    is_sent: bool


class NcclGroup:
    """One member's end of a group, on its `device`.

    After an error it is only good for `abort` and `close`. One thread uses it, any thread may abort it, which
    waits for nothing.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self.device = device
        self._runtime, self._news = runtime, runtime.event()
        self._until = math.inf
        self._process_group: ProcessGroup | None = None
        self._store: SealedStore | None = None
        self._messages: Sequence[Message] = ()
        self._is_aborted = self._is_told = False
        self._stream = torch.cuda.Stream(device)

    def form(self, store: SealedStore, group: Group, until: float) -> None:
        """Make a communicator with the other members, which meet in `store`; as `GlooGroup.form`."""
        self._store, self._until = store, until
        try:
            own = store.clone()  # for the watcher: this thread may come to wait in the other connection
            made = self._process_group = make_process_group(store, group)
            self._runtime.spawn("direct-watcher", partial(self._watch, own, made))
            made.eager_connect_single_device(self.device)
        except FAILURES as error:
            raise explain(
                error, self._runtime.now(), until, f"the NCCL group {group.membership} did not form"
            ) from error
        self.check(until)

    @contextlib.contextmanager
    def within(self, until: float) -> Iterator[None]:
        """Give what is computed in the block to the stream of the waves; abort at `until`, or if it raises.

        It comes after what the GPU was given before: memory may have been of another use until then.
        """
        self._watch_until(until)
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            self.abort()
            raise
        finally:
            self._watch_until(math.inf)

    def start(self, messages: Sequence[Message], until: float) -> Wave:
        """Start the messages of a wave together, those of each pair in this order.

        Raises:
            DeadlineExceeded, SyncError: As `Wave.wait`.
        """
        group = self.check(until)
        self._messages = messages
        try:
            group._start_coalescing()
            for message in messages:
                move = group.send if message.is_sent else group.recv
                move([message.data_B], message.other, 0)
            return Wave(self, group._end_coalescing(), until)
        except FAILURES as error:
            raise explain(error, self._runtime.now(), until, "a wave did not start") from error

    def check(self, until: float) -> ProcessGroup:
        """Raise DeadlineExceeded or SyncError if the group was aborted, at the deadline or before."""
        if self._runtime.now() >= until:
            raise DeadlineExceeded("no time is left for the transfer")
        group = self._process_group
        if self._is_aborted or group is None:
            raise SyncError("the group is not usable: it never formed or was aborted")
        return group

    def pause(self) -> None:
        """Wait for a moment."""
        self._runtime.sleep(POLL_S)

    def abort(self) -> None:
        """Have the watcher abort the communicator, and tell the other members."""
        self._is_told = self._is_aborted = True
        self._news.set()

    def close(self) -> None:
        """Have the watcher free the group; may be called twice."""
        self._is_aborted = True
        self._news.set()

    def _watch_until(self, until: float) -> None:
        self._until = until
        self._news.set()

    def _watch(self, store: SealedStore, group: ProcessGroup) -> None:
        """Wait for an abort or the deadline, then abort. Here alone, as it may take seconds."""
        while not self._is_aborted:
            self._news.clear()  # before the deadline is read: a later one is news
            left_s = self._until - self._runtime.now()
            if self._is_aborted or left_s <= 0 or (left_s < math.inf and _has_aborted(store)):
                break
            self._news.wait(min(WATCH_S if left_s < math.inf else IDLE_S, left_s))
        if self._is_told or not self._is_aborted:
            self._is_aborted = True
            with contextlib.suppress(*FAILURES):
                store.set(ABORTED, b"1")
        try:
            group.abort()
        except FAILURES as error:
            log.warning("the abort of a NCCL group failed: %s", error)
        self._process_group, self._messages = None, ()


class Wave:
    """Messages under way."""

    def __init__(self, group: NcclGroup, work: Work, until: float) -> None:
        self._group, self._work, self._until = group, work, until

    def wait(self) -> None:
        """Return once all have left or are here.

        Raises:
            DeadlineExceeded: They were not until the deadline.
            SyncError: A member aborted, or the library failed.
        """
        while not self._is_over():
            self._group.check(self._until)
            self._group.pause()
        self._group.check(self._until)  # an abort ends the work too, whatever has arrived

    def _is_over(self) -> bool:
        try:
            return bool(self._work.is_completed())
        except FAILURES as error:
            raise SyncError(f"a wave failed: {str(error).strip().splitlines()[0][:200]}") from error


def make_process_group(store: SealedStore, group: Group) -> ProcessGroup:
    """Return a ProcessGroupNCCL of the members that meet in `store`; it is connected to nobody yet."""
    nccl = getattr(distributed_c10d, "ProcessGroupNCCL", None)
    if nccl is None:
        raise SyncError("this torch has no NCCL")
    options = nccl.Options()
    options._timeout = NO_TIMEOUT
    options.config.blocking = 0  # so that one that forms can be aborted too
    options.config.max_ctas = MAX_CTAS
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        return cast(ProcessGroup, nccl(store, group.rank, group.world, options))
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _has_aborted(store: SealedStore) -> bool:
    """Tell whether another member has aborted; a store that is gone, its members with it, says so too."""
    try:
        return store.check([ABORTED])
    except FAILURES:
        return True
