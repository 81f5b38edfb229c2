"""Relay of a version from the receiver's file to workers on other nodes of a replica, which cannot map it.

The engine's first worker sends the buckets to the first worker of each other node, which keeps and verifies
them in anonymous shared memory; its neighbours map that. Generation is paused meanwhile: only a version that
workers receive themselves needs no relay. Invariants: nothing is sent before all workers are ready for it;
no byte is loaded whose bucket has another digest than the manifest says.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import xxhash

from asyncrl.core.errors import SyncError
from weight_sync.memory import segments
from weight_sync.memory.manifest import Manifest

Together = Callable[[str], AbstractContextManager[None]]
"""Named block that fails on all workers if it does on one."""


@dataclass(frozen=True)
class Relay:
    """Part of one worker.

    Attributes:
        group: Of all workers, gloo.
        per_node: Workers of each node; their ranks are consecutive.
        together: Runs a block on all workers.
    """

    group: torch.distributed.ProcessGroup
    per_node: int
    together: Together

    @contextmanager
    def carried(self, path: str, manifest: Manifest) -> Iterator[str]:
        """Yield the path of a file of this node with the version that rank 0 has at `path`.

        The block opens it together with the others: the file goes with the block of a neighbour.

        Raises:
            SyncError: Rank 0 cannot read it, or another node has no room for it or got other bytes.
        """
        rank, memory = self.group.rank(), None
        try:
            with self.together("hold the version"):
                memory = self._prepare(path, manifest) if rank % self.per_node == 0 else None
            if memory is not None and rank == 0:
                self._send(memory.data, manifest)
            with self.together("relay the version"):
                if memory is not None and rank:
                    self._receive(memory.data, manifest)
            places = [torch.zeros(2, dtype=torch.int64) for _ in range(self.group.size())]
            own = torch.tensor([os.getpid(), memory.descriptor if memory is not None and rank else 0])
            self.group.allgather([places], [own]).wait()
            process, descriptor = places[rank - rank % self.per_node].tolist()
            yield f"/proc/{process}/fd/{descriptor}" if rank >= self.per_node else path
        finally:
            if memory is not None and rank:
                os.close(memory.descriptor)

    def _prepare(self, path: str, manifest: Manifest) -> _Memory:
        """Map the file on the first node, make room on another."""
        num_bytes = manifest.total_bytes
        if self.group.rank() == 0:
            return _Memory(segments.attach(path, num_bytes, mmap.MAP_PRIVATE))
        descriptor = os.memfd_create("asyncrl-version", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return _Memory(mmap.mmap(descriptor, num_bytes), descriptor)
        except OSError as error:
            os.close(descriptor)
            raise SyncError(f"no room for the {num_bytes} bytes of a version: {error.strerror}") from error

    def _send(self, data: mmap.mmap, manifest: Manifest) -> None:
        for piece in _buckets(data, manifest):
            for other in range(self.per_node, self.group.size(), self.per_node):
                self.group.send([piece], other, 0).wait()

    def _receive(self, data: mmap.mmap, manifest: Manifest) -> None:
        """Receive all buckets, whatever is in them, and verify them then."""
        pieces = list(_buckets(data, manifest))
        for piece in pieces:
            self.group.recv([piece], 0, 0).wait()
        for index, piece in enumerate(pieces):
            if xxhash.xxh3_128(piece.numpy().data).hexdigest() != manifest.buckets[index].digest:
                number = manifest.version.number
                raise SyncError(f"bucket {index} of version {number} is not what the learner wrote")


@dataclass(frozen=True)
class _Memory:
    data: mmap.mmap
    descriptor: int = -1


def _buckets(data: mmap.mmap, manifest: Manifest) -> Iterator[torch.Tensor]:
    for index in range(len(manifest.buckets)):
        start, end = manifest.bucket_range(index)
        yield torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=start)
