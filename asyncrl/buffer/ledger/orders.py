"""The order of prompts and the seeds of samples (pure).

Owns two functions of the run's seed: which prompt comes at which place, and which seed a sample
gets. Neither knows of attempts, replicas or time, so a prompt that is generated again is the same
prompt with the same seeds. Nothing is stored: the order is computed place by place, so that it is the
same after any crash and on any number of replicas.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

BLOCK = 1000
"""Places over which sources are mixed: among so many, each has its share to one prompt."""
NUM_STAGES = 10
"""Parts of a pass from easy to hard; inside a part the order is shuffled."""
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


class Source(NamedTuple):
    """One source of prompts: how many it has, and its weight in the mix."""

    num_prompts: int
    weight: float = 1.0


class Draw(NamedTuple):
    """The prompt at a place: its source, that source's traversal, and its row, counted over all sources."""

    source: int
    pass_number: int
    row: int


@dataclass(frozen=True)
class PromptOrder:
    """Order in which prompts are drawn: every pass goes through all prompts of a source once.

    Rows count over all sources, one source after the other. Of each `BLOCK` places a source gets its
    share by weight, at least one, and these are spread by the seed; it goes through its passes at its own
    pace.

    Attributes:
        run_seed: Seed of the run.
        sources: At least one, each with at least one prompt.
        is_shuffled: Each pass of a source has its own seeded permutation; otherwise the source's order.
        is_ascending: Prompts are numbered from easy to hard. The first pass goes through `NUM_STAGES` parts
            in that order and is shuffled inside each; later passes are as without it.

    >>> order = PromptOrder(run_seed=0, sources=(Source(3),), is_shuffled=True)
    >>> sorted(order.at(place).row for place in range(3))
    [0, 1, 2]
    """

    run_seed: int
    sources: tuple[Source, ...]
    is_shuffled: bool
    is_ascending: bool = False

    def at(self, place: int) -> Draw:
        """Return the prompt drawn at `place`, counted from 0 over all sources and passes."""
        source, rank = (0, place) if len(self.sources) == 1 else self._mix(place)
        size = self.sources[source].num_prompts
        pass_number, offset = divmod(rank, size)
        first = sum(one.num_prompts for one in self.sources[:source])
        return Draw(source, pass_number, first + self._permuted(source, pass_number, offset))

    def _mix(self, place: int) -> tuple[int, int]:
        """Return the source at `place`, and how many prompts of it were drawn before."""
        block, offset = divmod(place, BLOCK)
        shares = shares_of(tuple(source.weight for source in self.sources))
        source, before = _layout(_digest(f"mix/{self.run_seed}/{block}"), shares)[offset]
        return source, block * shares[source] + before

    def _permuted(self, source: int, pass_number: int, offset: int) -> int:
        size = self.sources[source].num_prompts
        if not self.is_shuffled:
            return offset
        key = _pass_key(self.run_seed, source, pass_number)
        if not self.is_ascending or pass_number:
            return permute(offset, size, key)
        stage_size = -(-size // NUM_STAGES)
        begin = offset - offset % stage_size
        return begin + permute(offset - begin, min(stage_size, size - begin), key)


@functools.lru_cache(maxsize=16)
def shares_of(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many of `BLOCK` places each weight gets: in proportion, at least one, `BLOCK` together.

    >>> shares_of((3.0, 1.0))
    (750, 250)
    """
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) < BLOCK:
        shares[_largest([want - share for want, share in zip(exact, shares, strict=True)])] += 1
    while sum(shares) > BLOCK:
        surplus = (
            share - want if share > 1 else -math.inf for want, share in zip(exact, shares, strict=True)
        )
        shares[_largest(list(surplus))] -= 1
    return tuple(shares)


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda number: values[number])


@functools.lru_cache(maxsize=4)
def _layout(key: int, shares: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return for each place of a block its source, and how many of that source come before it there."""
    owners = [source for source, share in enumerate(shares) for _ in range(share)]
    counts = [0] * len(shares)
    layout = []
    for place in range(BLOCK):
        source = owners[permute(place, BLOCK, key)]
        layout.append((source, counts[source]))
        counts[source] += 1
    return tuple(layout)


@functools.lru_cache(maxsize=256)
def _pass_key(run_seed: int, source: int, pass_number: int) -> int:
    where = f"{source}/{pass_number}" if source else f"{pass_number}"
    return _digest(f"pass/{run_seed}/{where}")


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


def evaluation_seed(run_seed: int, prompt: int, sample: int) -> int:
    """Return the seed of a sample of a held-out prompt, which no ticket's has: tickets count from 1."""
    return sample_seed(run_seed, -sample, prompt)


def prompts_of_part(num_prompts: int, part: int, num_parts: int) -> range:
    """Return which of the held-out prompts are in one part of an evaluation.

    >>> list(prompts_of_part(7, part=1, num_parts=3))
    [1, 4]
    """
    return range(part, num_prompts, num_parts)
