"""Trailers of packs: digests, or tags where others may change bytes. A GPU digests what it holds itself.

There each 8 bytes are mixed with their place and the seed by a bijection of splitmix64's, and the results are
added up, twice with different seeds: 16 bytes. A change within one such group of 8 is always found, one of
several missed by a chance of about 2^-64 at most. Whoever changes bytes on purpose can make it anew.
"""

from __future__ import annotations

import torch
import xxhash

from asyncrl.core.errors import SyncError
from weight_sync.backends.tags import TAG_BYTES, Tags
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.transports.choice import HOST

DIGEST_BYTES = 16
PLACE_BITS = 32
"""Of a pack's number; above them are those of its round, which tell rounds of one membership apart."""
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Constants of splitmix64, as signed numbers."""
_PRIMES = (0x2545F4914F6CDD1D, 0x27BB2EE687B0B0FD)


class Seals:
    """Trailers of packs: digests, or tags where others may change bytes; of one round and place alone.

    Digests of packs on a GPU are computed there; tags are made of a copy in host memory.
    """

    def __init__(self, order: SeatOrder, device: torch.device = HOST) -> None:
        self._first_place = order.round % (1 << PLACE_BITS) << PLACE_BITS
        self._tags = Tags(order.secret, order.membership) if order.is_tagged else None
        self._device = device

    def empty(self, num_before: int = 0) -> torch.Tensor:
        """Return room for a trailer, behind so many other bytes."""
        num_bytes = num_before + (TAG_BYTES if self._tags else DIGEST_BYTES)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def make(self, index: int, data_B: torch.Tensor) -> torch.Tensor:
        """Return the trailer of pack `index`."""
        place = self._first_place | index
        if self._tags is not None:
            return self._tags.make(place, data_B.cpu()).to(self._device)
        if self._device != HOST:
            return digest_on_device(data_B, place)
        digest = xxhash.xxh3_128(data_B.numpy().data, seed=place).digest()
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8)

    def fits(self, index: int, data_B: torch.Tensor, trailer_B: torch.Tensor) -> bool:
        """Tell whether a trailer is that of the pack."""
        if self._tags is None:
            return torch.equal(self.make(index, data_B), trailer_B)
        try:
            self._tags.check(self._first_place | index, data_B.cpu(), trailer_B.cpu())
        except SyncError:
            return False
        return True


def digest_on_device(data_B: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the digest of `data_B` (uint8, dense, at a multiple of 8 bytes), 16 bytes on its device."""
    num_whole = data_B.numel() // 8 * 8
    words_W = data_B[:num_whole].view(torch.int64)
    if num_whole < data_B.numel():
        rest_B = torch.zeros(8, dtype=torch.uint8, device=data_B.device)
        rest_B[: data_B.numel() - num_whole].copy_(data_B[num_whole:])
        words_W = torch.cat([words_W, rest_B.view(torch.int64)])
    places_W = torch.arange(1, len(words_W) + 1, device=data_B.device).mul_(_STEP)
    sums = [_mix(words_W ^ (places_W + _wrap((seed + 1) * prime))).sum() for prime in _PRIMES]
    return (torch.stack(sums) + data_B.numel()).view(torch.uint8)


def _mix(words_W: torch.Tensor) -> torch.Tensor:
    """Mix each number by a bijection; overwrites them."""
    for bits, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        words_W ^= (words_W >> bits) & ((1 << (64 - bits)) - 1)  # no sign is shifted in
        words_W *= factor
    return words_W


def _wrap(number: int) -> int:
    """Return the signed 64 bits of `number`."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
