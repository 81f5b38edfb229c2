"""Broadcast over a private NCCL group, one GPU per member. By construction: multi-rank not run.

Owns the deadline of a communicator that cannot be given one. Buckets go host → GPU → peers → host.
NCCL's own watchdog would kill the process when a peer hangs; it is switched off here, and a watcher
thread aborts the communicator at the deadline instead, which wakes the waiter.
Making the communicator has no deadline of its own either: members meet in the store before, and NCCL
makes it without blocking, within a time of torch's that is fixed by the first one of a process.
  watcher  consumes: one operation   waits for: its end, until the deadline
           unblocked by: the end     produces: an abort
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.runtime.clock import Clock
from weight_sync.backends.contract import Group
from weight_sync.backends.rendezvous import connect_store, meet
from weight_sync.backends.sealed import SealedStore

WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
NONBLOCKING = "TORCH_NCCL_USE_COMM_NONBLOCKING"
NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""Seconds; 30 minutes without it, and an abort waits for them: torch holds the communicator's lock."""


class Communicator(Protocol):
    """Interface of NCCL that the transport needs. `broadcast` blocks until done or aborted."""

    def broadcast(self, bucket: torch.Tensor) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


Connect = Callable[[Group, TCPStore | None, str, timedelta], Communicator]


def is_available() -> bool:
    """Tell whether this process could be a member of an NCCL group."""
    return torch.cuda.is_available() and dist.is_nccl_available()


class NcclTransport:
    """The NCCL side of `contract.Transport`; who has another `secret` is in no group with it."""

    def __init__(
        self, clock: Clock, secret: str, store: TCPStore | None = None, connect: Connect | None = None
    ) -> None:
        self._clock = clock
        self._secret = secret
        self._store = store
        self._connect = connect or ProcessGroupCommunicator
        self._communicator: Communicator | None = None
        self._is_aborted = threading.Event()

    def form(self, group: Group, until: float) -> None:
        left_s = self._left_s(until)
        try:
            self._communicator = self._connect(group, self._store, self._secret, timedelta(seconds=left_s))
        except RuntimeError as error:
            raise self._explain(error, until, f"membership {group.membership} did not form") from error

    def start(self, bucket: torch.Tensor, until: float) -> _Broadcast:
        return _Broadcast(self, bucket, until)

    def broadcast(self, bucket: torch.Tensor, until: float) -> None:
        communicator = self._communicator
        if communicator is None or self._is_aborted.is_set():
            raise SyncError("the NCCL group is not usable: it never formed or was aborted")
        left_s = self._left_s(until)
        try:
            with self._watched(left_s):
                communicator.broadcast(bucket)
        except RuntimeError as error:
            self.abort()  # a shutdown would wait for what can no longer end
            raise self._explain(error, until, "a broadcast failed") from error
        if self._is_aborted.is_set():  # the kernel ended because it was aborted, not because it was done
            raise self._explain(RuntimeError("aborted"), until, "a broadcast failed")

    def abort(self) -> None:
        if self._is_aborted.is_set():
            return
        self._is_aborted.set()
        if self._communicator is not None:
            # In a thread: torch's abort waits for the communicator's lock, which its making holds.
            threading.Thread(target=self._communicator.abort, name="nccl-abort", daemon=True).start()

    def close(self) -> None:
        was_aborted = self._is_aborted.is_set()
        self._is_aborted.set()
        communicator, self._communicator = self._communicator, None
        if communicator is not None and not was_aborted:
            communicator.close()

    @contextlib.contextmanager
    def _watched(self, left_s: float) -> Iterator[None]:
        is_done = threading.Event()

        def watch() -> None:
            if not is_done.wait(left_s):
                self.abort()

        watcher = threading.Thread(target=watch, name="nccl-watcher", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_done.set()

    def _left_s(self, until: float) -> float:
        left_s = until - self._clock.now()
        if left_s <= 0:
            raise DeadlineExceeded("no time is left for an NCCL operation")
        return left_s

    def _explain(self, error: Exception, until: float, what: str) -> SyncError | DeadlineExceeded:
        first_line = str(error).strip().split("\n")[0][:200]
        if self._clock.now() >= until - 0.05:
            return DeadlineExceeded(f"{what} in time: {first_line}")
        return SyncError(f"{what}: {first_line}")


@dataclass(frozen=True)
class _Broadcast:
    """Begins when it is waited for: NCCL has one staging buffer on the GPU, and one stream."""

    transport: NcclTransport
    bucket: torch.Tensor
    until: float

    def wait(self) -> None:
        self.transport.broadcast(self.bucket, self.until)


class ProcessGroupCommunicator:
    """The real communicator: a private ProcessGroupNCCL and a staging buffer on the GPU."""

    def __init__(self, group: Group, store: TCPStore | None, secret: str, timeout: timedelta) -> None:
        # Read by torch's group when it is made.
        limit = {NONBLOCKING: "1", NONBLOCKING_TIMEOUT: str(math.ceil(timeout.total_seconds()))}
        os.environ.update(WATCHDOG_OFF | limit)
        process_group_class: Any = dist.ProcessGroupNCCL
        options = process_group_class.Options()
        options._timeout = timeout
        own_store = connect_store(store, group.store_host, group.store_port, timeout)
        self._rendezvous = SealedStore(own_store, secret, group.membership)
        meet(self._rendezvous, group.rank, group.world, timeout)
        self._process_group = process_group_class(self._rendezvous, group.rank, group.world, options)
        self._rank = group.rank
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def broadcast(self, bucket: torch.Tensor) -> None:
        if self._buffer.numel() < bucket.numel():
            self._buffer = torch.empty(bucket.numel(), dtype=torch.uint8, device=self._device)
        piece = self._buffer[: bucket.numel()]
        if self._rank == 0:
            piece.copy_(bucket)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._process_group.broadcast([piece], options).wait()
        torch.cuda.current_stream(self._device).synchronize()
        if self._rank != 0:
            bucket.copy_(piece)

    def abort(self) -> None:
        self._process_group.abort()

    def close(self) -> None:
        self._process_group.shutdown()
