"""Communication between all ranks, or those of one share: bytes by broadcast, small lists by gather.

Consists of collectives only: every rank calls each function, in the same order. With one rank
nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from learner.orders import Finish, Order, decode_order, encode_order


class Ranks:
    """This process's place among the learner's ranks, or those of `group`; rank 0 leads."""

    def __init__(
        self, rank: int, world_size: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self._group = group

    def of_share(self, share: int, timeout_s: float) -> Ranks:
        """Return the ranks that train the same share of a batch as this one; they make a group of their own.

        Args:
            share: This rank's `dp_rank`.
            timeout_s: Of each of their collectives.
        """
        if self.world_size == 1:
            return self
        mine = torch.tensor([share], device=self._device)
        found = [torch.zeros_like(mine) for _ in range(self.world_size)]
        dist.all_gather(found, mine, group=self._group)
        shares = [int(other) for other in found]
        members = [[rank for rank, other in enumerate(shares) if other == one] for one in sorted({*shares})]
        mates = next(ranks for ranks in members if self.rank in ranks)
        if len(members) == self.world_size:
            return Ranks(0, 1, self._device)
        groups = [dist.new_group(ranks, timedelta(seconds=timeout_s)) for ranks in members]
        return Ranks(mates.index(self.rank), len(mates), self._device, groups[members.index(mates)])

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
            dist.all_reduce(total, group=self._group)
        return [int(value) for value in total.tolist()]

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each value over all ranks."""
        found = torch.tensor(list(values), dtype=torch.long, device=self._device)
        if self.world_size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return [int(value) for value in found.tolist()]

    def share_bytes(self, data: bytes | None) -> bytes:
        """Return the leader's data on every rank; the others pass none."""
        return self._broadcast(data) if self.world_size > 1 else data or b""

    def merge_bytes(self, data: bytes) -> bytes:
        """Return all ranks' bytes in one; at each place one rank at most has another byte than zero."""
        if self.world_size == 1:
            return data
        merged = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        dist.all_reduce(merged, group=self._group)
        return bytes(merged.cpu().numpy().tobytes())

    def gather(self, values: Sequence[int]) -> list[int]:
        """Return every rank's values, sorted, each once."""
        if self.world_size == 1:
            return sorted(set(values))
        sizes = [torch.zeros(1, dtype=torch.long, device=self._device) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(values)], device=self._device), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.full((longest,), -1, dtype=torch.long, device=self._device)
        padded[: len(values)] = torch.tensor(list(values), dtype=torch.long)
        found = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(found, padded, group=self._group)
        return sorted({int(value) for value in torch.cat(found).tolist() if value >= 0})

    def _broadcast(self, data: bytes | None) -> bytes:
        length = torch.tensor([len(data or b"")], device=self._device)
        dist.broadcast(length, group=self._group, group_src=0)
        buffer = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, group=self._group, group_src=0)
        return bytes(buffer.cpu().numpy().tobytes())
