"""Bare gloo: what broadcasts cost without anything of ours around them.

Owns one rank of a group, with the options that ours has. Rank 0 sends; the others receive into memory
that they have touched before. A turn begins with a broadcast of one byte, so that all start together.
"""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from benchmarks.weight_sync.peers.peers import Peer, now_s, obey
from benchmarks.weight_sync.peers.weights import cut, flatten, make_weights
from weight_sync.backends.gloo import LOOPBACK
from weight_sync.backends.rendezvous import open_store

TIMEOUT = timedelta(seconds=60)
BUCKETED, TENSORS, MEMCPY = "bucketed", "tensors", "memcpy"


class GlooRank:
    """One rank. `turn` returns when it began and ended, on the clock that all processes share."""

    def __init__(self, rank: int, world: int, port: int, num_bytes: int, bucket_bytes: int) -> None:
        store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = TIMEOUT
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        self._group = gloo(PrefixStore(f"bare-{world}", store), rank, world, options)
        self._broadcast = BroadcastOptions()
        self._broadcast.rootRank = self._broadcast.rootTensor = 0
        self._broadcast.timeout = TIMEOUT
        weights = make_weights(num_bytes)
        self._bytes_B = flatten(weights)
        self._tensors = list(self._bytes_B.split([tensor.numel() * tensor.itemsize for _, tensor in weights]))
        self._copy_B = self._bytes_B.clone() if rank == 0 else None
        self._buckets = cut(self._bytes_B, bucket_bytes)
        self._signal = torch.zeros(1, dtype=torch.uint8)

    def turn(self, way: str) -> tuple[float, float]:
        """Send or receive everything once, or copy it within rank 0."""
        self._send(self._signal)
        began = now_s()
        if way == BUCKETED:
            for bucket in self._buckets:
                self._send(bucket)
        elif way == TENSORS:
            for tensor in self._tensors:
                self._send(tensor)
        elif self._copy_B is not None:
            self._copy_B.copy_(self._bytes_B)
        return began, now_s()

    def num_bytes(self) -> int:
        """Return the bytes of a turn."""
        return self._bytes_B.numel()

    def _send(self, tensor: torch.Tensor) -> None:
        self._group.broadcast([tensor], self._broadcast).wait(TIMEOUT)


def run_rank(pipe: Connection, *args: int) -> None:
    """Entry of a rank's process; `args` are those of `GlooRank`."""
    rank = GlooRank(*args)
    obey(pipe, {"turn": rank.turn, "num_bytes": rank.num_bytes})


class BareGroup:
    """One sender and `num_receivers` receivers."""

    def __init__(self, num_receivers: int, num_bytes: int, bucket_bytes: int) -> None:
        self._store = open_store(LOOPBACK, 0, TIMEOUT)
        world = num_receivers + 1
        self._ranks = [
            Peer(f"gloo rank {rank}", run_rank, rank, world, self._store.port, num_bytes, bucket_bytes)
            for rank in range(world)
        ]

    def seconds(self, way: str) -> float:
        """Return the seconds from the sender's start to the last receiver's end."""
        self.begin(way)
        began, ended = self.end(way)
        return ended - began

    def begin(self, way: str) -> None:
        """Have all ranks take a turn."""
        for rank in self._ranks:
            rank.tell("turn", way)

    def end(self, way: str) -> tuple[float, float]:
        """Return when the sender began that turn and the last receiver ended it."""
        times = [rank.hear() for rank in self._ranks]
        ends = times[:1] if way == MEMCPY else times[1:]
        return float(times[0][0]), float(max(end for _, end in ends))

    def num_bytes(self) -> int:
        """Return the bytes of a turn."""
        return int(self._ranks[0].ask("num_bytes"))

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.close()
