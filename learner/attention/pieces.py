"""Pieces of packed rows: runs of tokens whose queries a rank holds, each with the keys that they see.

Without context parallelism a row is one piece. Else a row of L tokens is cut into 2·cp runs; rank r holds
runs r and 2·cp-1-r, so that every rank has the same share of the causal triangle. Invariant: a piece sees its
own row, from the row's first token to the piece's last, and nothing else.

Shapes: P pieces, R rows, N queries of this rank, K keys that its pieces see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces that have a query, in packed order.

    Attributes:
        num_queries_P: Their queries, which are the last of the piece's keys.
        num_keys_P: The keys that they see.
        key_source_K: Where the keys of one piece after another lie; None: where the queries lie.
    """

    num_queries_P: torch.Tensor
    num_keys_P: torch.Tensor
    key_source_K: torch.Tensor | None = None


def whole_rows(cu_seqlens: Sequence[int]) -> Pieces:
    """Return each row, which starts and ends at `cu_seqlens` (R + 1 ascending positions), as one piece."""
    lengths_R = torch.tensor(cu_seqlens).diff()
    return Pieces(lengths_R, lengths_R)


def cut_rows(lengths_R: torch.Tensor, cp_rank: int, cp_size: int) -> Pieces:
    """Return the pieces of one of several context-parallel ranks; keys lie where the rows have them."""
    num_runs = 2 * cp_size
    bounds = (cp_rank, cp_rank + 1, num_runs - 1 - cp_rank, num_runs - cp_rank)
    bounds_R4 = torch.stack([lengths_R * bound // num_runs for bound in bounds], 1)
    first_RB, end_RB = bounds_R4[:, ::2], bounds_R4[:, 1::2]
    if cp_rank == cp_size - 1:  # its runs are neighbours: one piece
        first_RB, end_RB = first_RB[:, :1], end_RB[:, 1:]
    starts_RB = (lengths_R.cumsum(0) - lengths_R)[:, None].expand_as(end_RB)
    num_queries_P, num_keys_P = (end_RB - first_RB).flatten(), end_RB.flatten()
    held = num_queries_P > 0
    num_keys_P = num_keys_P[held]
    return Pieces(num_queries_P[held], num_keys_P, runs(starts_RB.flatten()[held], num_keys_P))


def runs(starts_P: torch.Tensor, counts_P: torch.Tensor) -> torch.Tensor:
    """Return `counts_P` ascending numbers from each of `starts_P` on, one run after another.

    >>> runs(torch.tensor([5, 0]), torch.tensor([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    offsets_P = counts_P.cumsum(0) - counts_P
    return torch.repeat_interleave(starts_P - offsets_P, counts_P) + torch.arange(int(counts_P.sum()))
