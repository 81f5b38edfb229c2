"""Communication between all ranks: bytes by broadcast, small lists by gather.

Consists of collectives only: every rank calls each function, in the same order. With one rank
nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from learner.orders import Finish, Order, decode_order, encode_order


class Ranks:
    """This process's place among the learner's ranks; rank 0 leads."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def share(self, order: Order) -> Order:
        """Send the leader's order to the others and return it."""
        if self.world_size > 1:
            self._broadcast(encode_order(order))
        return order

    def follow(self) -> Iterator[Order]:
        """Yield the leader's orders until it finishes."""
        while True:
            order = decode_order(self._broadcast(None))
            yield order
            if isinstance(order, Finish):
                return

    def add(self, values: Sequence[int]) -> list[int]:
        """Return the sums of each value over all ranks."""
        total = torch.tensor(list(values), dtype=torch.long, device=self._device)
        if self.world_size > 1:
            dist.all_reduce(total)
        return [int(value) for value in total.tolist()]

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each value over all ranks."""
        found = torch.tensor(list(values), dtype=torch.long, device=self._device)
        if self.world_size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return [int(value) for value in found.tolist()]

    def share_bytes(self, data: bytes | None) -> bytes:
        """Return the leader's data on every rank; the others pass none."""
        return self._broadcast(data) if self.world_size > 1 else data or b""

    def merge_bytes(self, data: bytes) -> bytes:
        """Return all ranks' bytes in one; at each place one rank at most has another byte than zero."""
        if self.world_size == 1:
            return data
        merged = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        dist.all_reduce(merged)
        return bytes(merged.cpu().numpy().tobytes())

    def gather(self, values: Sequence[int]) -> list[int]:
        """Return every rank's values, sorted, each once."""
        if self.world_size == 1:
            return sorted(set(values))
        sizes = [torch.zeros(1, dtype=torch.long, device=self._device) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(values)], device=self._device))
        longest = max(int(size) for size in sizes)
        padded = torch.full((longest,), -1, dtype=torch.long, device=self._device)
        padded[: len(values)] = torch.tensor(list(values), dtype=torch.long)
        found = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(found, padded)
        return sorted({int(value) for value in torch.cat(found).tolist() if value >= 0})

    def _broadcast(self, data: bytes | None) -> bytes:
        length = torch.tensor([len(data or b"")], device=self._device)
        dist.broadcast(length, 0)
        buffer = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0)
        return bytes(buffer.cpu().numpy().tobytes())
