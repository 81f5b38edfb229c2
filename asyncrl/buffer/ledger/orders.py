"""The order of prompts and the seeds of samples (pure).

Owns two functions of the run's seed: which prompt comes at which place, and which seed a sample
gets. Neither knows of attempts, replicas or time, so a prompt that is generated again is the same
prompt with the same seeds. Nothing is stored: the permutation of a pass is computed place by place.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

_MASK_64 = (1 << 64) - 1
_NUM_ROUNDS = 6


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def ticket_seed(run_seed: int, ticket: int) -> int:
    """Return the seed of a ticket, 0 <= seed < 2**63."""
    return _digest(f"ticket/{run_seed}/{ticket}") >> 1


def sample_seed(run_seed: int, ticket: int, sample: int) -> int:
    """Return the seed of sample `sample` of a ticket, 0 <= seed < 2**63; the same at every attempt."""
    return _digest(f"sample/{run_seed}/{ticket}/{sample}") >> 1


@dataclass(frozen=True)
class PromptOrder:
    """Which prompt is drawn at which place: every pass goes through all prompts once.

    Attributes:
        run_seed: Seed of the run.
        num_prompts: Prompts of one pass, at least 1.
        is_shuffled: Each pass has its own seeded permutation; otherwise the file's order.

    >>> order = PromptOrder(run_seed=0, num_prompts=3, is_shuffled=True)
    >>> sorted(order.at(place)[1] for place in range(3))
    [0, 1, 2]
    """

    run_seed: int
    num_prompts: int
    is_shuffled: bool

    def at(self, place: int) -> tuple[int, int]:
        """Return (pass, index) of the prompt drawn at `place`, counted from 0 over all passes."""
        pass_number, offset = divmod(place, self.num_prompts)
        if not self.is_shuffled:
            return pass_number, offset
        return pass_number, permute(offset, self.num_prompts, _pass_key(self.run_seed, pass_number))


@functools.lru_cache(maxsize=4)
def _pass_key(run_seed: int, pass_number: int) -> int:
    return _digest(f"pass/{run_seed}/{pass_number}")


def permute(place: int, size: int, key: int) -> int:
    """Return where a keyed permutation of `range(size)` sends `place`.

    A Feistel network over the next even power of two, walked until it lands inside the range: no
    table, so a pass over any number of prompts costs no memory.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for number in range(_NUM_ROUNDS):
            # splitmix64's finalizer, in place: a call per round was a sixth of the ledger's time
            value = ((right ^ key ^ (number << 56)) + 0x9E3779B97F4A7C15) & _MASK_64
            value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
            value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK_64
            left, right = right, left ^ ((value ^ value >> 31) & mask)
        place = left << half_bits | right
        if place < size:
            return place
