"""Stripes: each of several publishers keeps and sends its own share of a version's buckets (pure).

There is a publisher on each node of the learner; publisher `i` owns stripe `i`. Invariant: for any number of
buckets, each bucket is in one stripe, and a stripe's buckets follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

PUBLISHER = "publisher"


@dataclass(frozen=True)
class Stripe:
    """Stripe `index` of `count`; with more stripes than buckets, some are empty.

    >>> [list(Stripe(index, 2).buckets(5)) for index in range(2)]
    [[0, 1], [2, 3, 4]]
    >>> Stripe(0, 1).publisher, Stripe(1, 2).publisher
    ('publisher', 'publisher.1')
    """

    index: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether there is no other one."""
        return self.count == 1

    @property
    def publisher(self) -> str:
        """Name of its publisher, as a peer of the coordinator."""
        return PUBLISHER if self.index == 0 else f"{PUBLISHER}.{self.index}"

    def buckets(self, num_buckets: int) -> range:
        """Return the indices of its buckets."""
        return range(num_buckets * self.index // self.count, num_buckets * (self.index + 1) // self.count)


WHOLE = Stripe()
