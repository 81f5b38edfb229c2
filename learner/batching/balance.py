"""Balancing of sequences over parts, so that every part has about the same work (pure).

Owns Karmarkar-Karp partitions, the planning of microbatches under a token budget, and the measures
of how even a share-out is. Must never look at anything but lengths. Invariants: every index is in
exactly one part, no microbatch is over the budget, and the same lengths give the same plan.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from asyncrl.core.errors import DataError

LINEAR_COST = 24_576
"""Tokens at which attention costs as much as all else: six times the hidden size of a 7 B model."""

Bin = tuple[float, int, list[tuple[int, float]]]
"""(sum, number of items, items as (index, workload)), compared in this order."""


class _State:
    """A partial partition: bins in descending order, empty ones left out."""

    def __init__(self, bins: list[Bin], num_parts: int) -> None:
        self.bins = sorted((found for found in bins if found[1]), reverse=True)
        smallest = self.bins[-1][0] if len(self.bins) == num_parts else 0
        self.spread = self.bins[0][0] - smallest

    def __lt__(self, other: _State) -> bool:
        """Come first in the heap with the larger spread, then with the larger first bin."""
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.bins[0] > other.bins[0]


def karmarkar_karp(workloads: Sequence[float], num_parts: int, *, equal_size: bool) -> list[list[int]]:
    """Return the indices of each part, ascending, by the largest differencing method.

    The two partial partitions that are least even are merged, largest bin with smallest, until one is
    left. Parts come in descending order of their sums. The same as verl's
    `get_seqlen_balanced_partitions`, in ties too.

    Args:
        workloads: One number per item, not negative.
        num_parts: At least 1, at most the number of items.
        equal_size: Whether every part has the same number of items.

    Raises:
        DataError: There are fewer items than parts, or they do not divide evenly.
    """
    if not 1 <= num_parts <= len(workloads):
        raise DataError(f"{len(workloads)} items cannot be shared out to {num_parts} parts")
    if equal_size and len(workloads) % num_parts:
        raise DataError(f"{len(workloads)} items cannot be shared out evenly to {num_parts} parts")
    order = sorted(range(len(workloads)), key=lambda index: (workloads[index], index))
    seed_size = num_parts if equal_size else 1
    states: list[_State] = []
    for start in range(0, len(order), seed_size):
        items = [(index, workloads[index]) for index in order[start : start + seed_size]]
        heapq.heappush(states, _State([(item[1], 1, [item]) for item in items], num_parts))
    while len(states) > 1:
        first, second = heapq.heappop(states), heapq.heappop(states)
        heapq.heappush(states, _State(_merge(first.bins, second.bins, num_parts), num_parts))
    return [sorted(index for index, _ in items) for _, _, items in states[0].bins]


def _merge(first: list[Bin], second: list[Bin], num_parts: int) -> list[Bin]:
    """Return bins where the largest of one took in the smallest of the other."""
    num_shared = len(first) + len(second) - num_parts
    if num_shared <= 0:
        return first + second
    start = num_parts - len(second)  # bins of `first` before it meet an empty bin
    merged = [_join(first[start + i], second[len(second) - 1 - i]) for i in range(num_shared)]
    return first[:start] + merged + second[: len(second) - num_shared]


def _join(left: Bin, right: Bin) -> Bin:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


def estimate_workload(num_tokens: int) -> int:
    """Return the cost of one sequence, in arbitrary units: linear layers and attention of a 7 B model."""
    return LINEAR_COST * num_tokens + num_tokens**2


def plan_microbatches(
    num_tokens: Sequence[int],
    max_tokens: int,
    *,
    workloads: Sequence[float] | None = None,
    min_parts: int = 1,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Return the rows of each microbatch: as few as the token budget allows, of about the same work.

    Microbatches with less work come first and last, where a pipeline fills and drains. To have ranks
    agree on the number, plan once, take the maximum over the ranks, and plan again with it as
    `min_parts`: the second plan has exactly that many (rounded up to `multiple_of`).

    Args:
        num_tokens: Length of each row.
        max_tokens: Budget of a microbatch.
        workloads: Of each row; None for those of `estimate_workload`.
        min_parts: Smallest number of parts; 0 allows an empty plan when there are no rows.
        multiple_of: The number of parts is a multiple of it.

    Returns:
        Row indices, ascending within a part. If more parts are wanted than there are rows, the last
        ones are empty.

    Raises:
        DataError: A row is longer than `max_tokens`.
    """
    longest = max(num_tokens, default=0)
    if longest > max_tokens:
        raise DataError(
            f"row {list(num_tokens).index(longest)} has {longest} tokens and does not fit a microbatch of "
            f"{max_tokens}",
            hint="Raise learner.max_tokens_per_microbatch",
        )
    workloads = workloads or [estimate_workload(count) for count in num_tokens]
    parts = _find_fewest_parts(num_tokens, workloads, max_tokens)
    wanted = max(len(parts), min_parts)
    wanted += -wanted % multiple_of
    num_filled = min(wanted, len(num_tokens))
    if num_filled > len(parts):
        parts = _divide_further(parts, num_tokens, workloads, max_tokens, num_filled)
    order = _order_small_at_ends([sum(workloads[row] for row in part) for part in parts])
    return [parts[index] for index in order] + [[] for _ in range(wanted - len(parts))]


def _find_fewest_parts(
    num_tokens: Sequence[int], workloads: Sequence[float], max_tokens: int
) -> list[list[int]]:
    """Return the first partition within the budget, from the fewest parts that could hold all tokens."""
    num_parts = -(-sum(num_tokens) // max_tokens) or min(1, len(num_tokens))
    while num_parts:
        parts = karmarkar_karp(workloads, num_parts, equal_size=False)
        if _fits(parts, num_tokens, max_tokens):
            return parts
        num_parts += 1  # ends: as many parts as rows fit
    return []


def _divide_further(
    parts: list[list[int]],
    num_tokens: Sequence[int],
    workloads: Sequence[float],
    max_tokens: int,
    num_parts: int,
) -> list[list[int]]:
    """Return `num_parts` parts within the budget, given fewer that are."""
    divided = karmarkar_karp(workloads, num_parts, equal_size=False)
    if _fits(divided, num_tokens, max_tokens):
        return divided
    # More parts need not fit where fewer did; halves of parts that fit always do.
    parts = list(parts)
    while len(parts) < num_parts:
        heaviest = max(
            (index for index in range(len(parts)) if len(parts[index]) > 1),
            key=lambda index: sum(workloads[row] for row in parts[index]),
        )
        rows = parts.pop(heaviest)
        halves = karmarkar_karp([workloads[row] for row in rows], 2, equal_size=False)
        parts += [[rows[index] for index in half] for half in halves]
    return parts


def _fits(parts: Sequence[Sequence[int]], num_tokens: Sequence[int], max_tokens: int) -> bool:
    return all(sum(num_tokens[row] for row in part) <= max_tokens for part in parts)


def _order_small_at_ends(workloads: Sequence[float]) -> list[int]:
    """Return indices so that the largest workload is in the middle and the smallest ones are at both ends."""
    descending = sorted(range(len(workloads)), key=lambda index: (-workloads[index], index))
    return descending[::2][::-1] + descending[1::2]


def measure_balance(num_tokens: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return verl's `global_seqlen/*`: tokens per part before and after balancing.

    Before: consecutive chunks of len(num_tokens) // len(parts) items. After: the sums of `parts`, which
    hold indices into `num_tokens`.
    """
    size = max(1, len(num_tokens) // len(parts))
    before = [sum(chunk) for chunk in _chunks(num_tokens, size)] or [0]
    after = [sum(num_tokens[index] for index in part) for part in parts]
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(num_tokens) / len(parts),
    }


def _chunks(values: Sequence[int], size: int) -> list[tuple[int, ...]]:
    iterator = iter(values)
    return list(iter(lambda: tuple(itertools.islice(iterator, size)), ()))
