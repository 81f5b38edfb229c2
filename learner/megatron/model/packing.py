"""Layout of a packed microbatch's rows on a rank, and their regrouping for attention.

Owns the index tensors that turn packed positions into padded buckets and back, and under context
parallelism the share of each row's tokens that a rank holds. They are made once per microbatch and shared by
all layers. Rows never attend to one another: the invariant of this module.

A row of L tokens is cut into 2·cp pieces; rank r holds pieces r and 2·cp-1-r, so that every rank has
the same share of the causal triangle. The padding of a rank to the common length is a row of its own.

Shapes: N positions of this rank, T positions of all context-parallel ranks, R rows, M padded positions
over all buckets, Q padded queries and K padded keys of a bucket's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn import functional

SHORTEST_BUCKET = 16
FORMAT = "packed_rows"
"""Not Megatron's `thd`: its unfused rotary embedding for `thd` loops over the rows in Python."""


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length. `mask` [R, 1, Q, K] is True where a query sees a key; None means causal."""

    num_rows: int
    num_queries: int
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Share:
    """Tokens that this rank holds.

    Attributes:
        num_tokens: Of the microbatch, without padding.
        own_N: Their positions in the packed microbatch; padding lies at `num_tokens` and behind.
        gathered_from_T: For every packed position where it lies once all ranks' shares are put together.
    """

    num_tokens: int
    own_N: torch.Tensor
    gathered_from_T: torch.Tensor

    def take(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of `values_T` (its last dimension), 0 where padding."""
        num_padding = len(self.gathered_from_T) - self.num_tokens
        return functional.pad(values_T, (0, num_padding))[..., self.own_N]


@dataclass
class PackedRows(PackedSeqParams):
    """Handed through the model beside the tokens; read by `RowAttention`, `RowRotary` and the heads.

    Attributes:
        positions_N: Position of each token within its row.
        query_from_M: For every padded query the position on this rank to read (0 where padding).
        output_from_N: For every position the padded query where its output lies.
        key_from_M: For every padded key the position to read, among those of all ranks.
        labels_N: The label of each position, for the head of a policy.
        is_in_order: Every padded place is the position of the same number: there is nothing to move.
        cos_N1C: Cosine of each position's rotary angles (C: half the head size), made once per pass.
        sin_N1C: Their sine.
        has_squares: Whether that head gives the sum of squared probabilities too.
    """

    share: Share | None = None
    positions_N: torch.Tensor | None = None
    query_from_M: torch.Tensor | None = None
    output_from_N: torch.Tensor | None = None
    key_from_M: torch.Tensor | None = None
    labels_N: torch.Tensor | None = None
    has_squares: bool = False
    is_in_order: bool = False
    cos_N1C: torch.Tensor | None = None
    sin_N1C: torch.Tensor | None = None
    buckets: tuple[Bucket, ...] = field(default=())


def bucket_length(num_tokens: int) -> int:
    """Return the length that a row may be padded to: a power of two up to 64, then quarters of an octave.

    Rows that share it share a bucket, padded to the longest of them. The waste is below one quarter for
    long rows, and the number of buckets stays logarithmic.
    """
    power = 1 << max(0, num_tokens - 1).bit_length()
    if power <= 64:
        return max(SHORTEST_BUCKET, power)
    quarter = power // 8
    return -(-num_tokens // quarter) * quarter


def describe_rows(
    cu_seqlens: Sequence[int],
    device: torch.device,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    multiple_of: int = 1,
) -> PackedRows:
    """Return the layout of rows that start and end at `cu_seqlens` (R + 1 ascending positions).

    Every rank holds the same number of positions, a multiple of `multiple_of` and at least one.
    """
    num_tokens = cu_seqlens[-1]
    lengths_R = torch.tensor(cu_seqlens).diff()
    owner_T = _own_tokens(lengths_R, cp_size)
    counts = torch.bincount(owner_T, minlength=cp_size)
    size = max(1, -(-int(counts.max()) // multiple_of)) * multiple_of
    owner_T = torch.cat([owner_T, torch.repeat_interleave(torch.arange(cp_size), size - counts)])
    lengths_R = torch.cat([lengths_R, (size - counts)[counts < size]])
    # Stable: within a rank the tokens stay in packed order.
    full_from_gathered = owner_T.sort(stable=True).indices
    own_N = full_from_gathered.view(cp_size, size)[cp_rank]
    share = Share(num_tokens, own_N.to(device), full_from_gathered.argsort().to(device))
    row_T = torch.repeat_interleave(torch.arange(len(lengths_R)), lengths_R)
    starts_R = lengths_R.cumsum(0) - lengths_R
    positions_N = own_N - starts_R[row_T[own_N]]
    rows = PackedRows(qkv_format=FORMAT, share=share, positions_N=positions_N.to(device))
    _describe_buckets(rows, lengths_R, starts_R, row_T[own_N], positions_N, is_cut=cp_size > 1)
    return rows


def _own_tokens(lengths_R: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Return the context-parallel rank that holds each token."""
    num_pieces = 2 * cp_size
    length_T = torch.repeat_interleave(lengths_R, lengths_R)
    starts_T = torch.repeat_interleave(lengths_R.cumsum(0) - lengths_R, lengths_R)
    position_T = torch.arange(len(length_T)) - starts_T
    # Piece k is [L·k // pieces, L·(k+1) // pieces).
    piece_T = ((position_T + 1) * num_pieces + length_T - 1) // length_T - 1
    return torch.minimum(piece_T, num_pieces - 1 - piece_T)


def _describe_buckets(
    rows: PackedRows,
    lengths_R: torch.Tensor,
    starts_R: torch.Tensor,
    row_N: torch.Tensor,
    positions_N: torch.Tensor,
    *,
    is_cut: bool,
) -> None:
    """Fill in the buckets: rows without a query on this rank are in none."""
    assert rows.share is not None
    device = rows.share.own_N.device
    num_own_R = torch.bincount(row_N, minlength=len(lengths_R))
    first_own_R = num_own_R.cumsum(0) - num_own_R
    padded_lengths = [bucket_length(length) for length in lengths_R.tolist()]
    output_from_N = torch.empty(len(row_N), dtype=torch.long)
    queries: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    buckets: list[Bucket] = []
    offset = 0
    for length in sorted(set(padded_lengths)):
        members = torch.tensor([row for row, padded in enumerate(padded_lengths) if padded == length])
        members = members[num_own_R[members] > 0]
        if not len(members):
            continue
        num_keys = int(lengths_R[members].max())
        num_queries = int(num_own_R[members].max()) if is_cut else num_keys
        query_RQ, is_query_RQ = _spread(first_own_R[members], num_own_R[members], num_queries)
        key_RK, is_key_RK = _spread(starts_R[members], lengths_R[members], num_keys)
        output_from_N[query_RQ[is_query_RQ]] = offset + is_query_RQ.view(-1).nonzero()[:, 0]
        mask = None
        if is_cut:  # a padded query reads position 0 of its row; its output is dropped
            seen_RQ = torch.where(is_query_RQ, positions_N[query_RQ], 0)
            mask = (seen_RQ[:, None, :, None] >= torch.arange(num_keys)).to(device)
        buckets.append(Bucket(len(members), num_queries, num_keys, mask))
        queries.append(query_RQ.view(-1))
        keys.append(torch.where(is_key_RK, key_RK, 0).view(-1))
        offset += query_RQ.numel()
    rows.query_from_M = torch.cat(queries).to(device)
    rows.output_from_N = output_from_N.to(device)
    rows.key_from_M = rows.share.gathered_from_T[torch.cat(keys).to(device)] if is_cut else rows.query_from_M
    rows.is_in_order = not is_cut and torch.equal(rows.query_from_M, torch.arange(len(row_N), device=device))
    rows.buckets = tuple(buckets)


def _spread(starts_R: torch.Tensor, counts_R: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [R, width] from each start on, 0 behind each count, and which are within it."""
    column = torch.arange(width)
    is_within = column < counts_R[:, None]
    return torch.where(is_within, starts_R[:, None] + column, 0), is_within
