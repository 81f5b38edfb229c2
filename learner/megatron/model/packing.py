"""Layout of a packed microbatch's rows on a rank: positions, attention, and the rank's share of each row.

It is made once per microbatch and shared by all layers. Under context parallelism a rank holds the pieces of
a row that `learner.attention.pieces` cuts; the padding of a rank to the common length is a row of its own.

Shapes: N positions of this rank, T positions of all context-parallel ranks, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn import functional

from learner.attention.layout import AttentionLayout, lay_out, lay_out_tree
from learner.attention.pieces import Pieces, cut_rows
from learner.batching.routing import Routing
from learner.batching.shared_prompts import SharedRows
from learner.numerics.transfer import send_fields

FORMAT = "packed_rows"
"""Not Megatron's `thd`: its unfused rotary embedding for `thd` loops over the rows in Python."""


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
        attention: How the rows lie for the kernel of attention.
        labels_N: The label of each position, for the head of a policy.
        cos_N1C: Cosine of each position's rotary angles (C: half the head size), made once per pass.
        sin_N1C: Their sine.
        shared: The tree that stands for the rows, where these share prompts: positions are its own, labels
            those of its pairs.
        has_squares: Whether that head gives the sum of squared probabilities too.
        routing: What routers of experts are told of the positions.
    """

    share: Share | None = None
    positions_N: torch.Tensor | None = None
    attention: AttentionLayout | None = None
    labels_N: torch.Tensor | None = None
    has_squares: bool = False
    cos_N1C: torch.Tensor | None = None
    sin_N1C: torch.Tensor | None = None
    shared: SharedRows | None = None
    routing: Routing | None = None


def describe_rows(
    cu_seqlens: Sequence[int],
    device: torch.device,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    multiple_of: int = 1,
    is_varlen: bool = False,
    experts_N: torch.Tensor | None = None,
) -> PackedRows:
    """Return the layout of rows that start and end at `cu_seqlens` (R + 1 ascending positions).

    Every rank holds the same number of positions, a multiple of `multiple_of` and at least one.

    Args:
        is_varlen: Attention is by the kernel for variable lengths.
        experts_N: As in `PackedBatch`.
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
    share = Share(num_tokens, own_N, full_from_gathered.argsort())
    row_T = torch.repeat_interleave(torch.arange(len(lengths_R)), lengths_R)
    starts_R = lengths_R.cumsum(0) - lengths_R
    pieces = Pieces(lengths_R, lengths_R)
    if cp_size > 1:
        pieces = _cut(lengths_R[: len(cu_seqlens) - 1], (size - counts).cumsum(0), share, cp_rank, cp_size)
    return send_fields(
        PackedRows(
            qkv_format=FORMAT,
            share=send_fields(share, device),
            positions_N=own_N - starts_R[row_T[own_N]],
            attention=lay_out(pieces, device, is_varlen=is_varlen),
            routing=send_fields(Routing.of_rows(cu_seqlens, own_N, experts_N), device),
        ),
        device,
    )


def describe_tree(
    cu_seqlens: Sequence[int],
    shared: SharedRows,
    device: torch.device,
    *,
    is_varlen: bool,
    experts_N: torch.Tensor | None = None,
) -> PackedRows:
    """Return the layout of the tree that stands for the rows at `cu_seqlens`, without context parallelism."""
    sent = send_fields(shared, device)
    rows = PackedRows(
        qkv_format=FORMAT,
        positions_N=shared.tree.positions_M,
        attention=lay_out_tree(shared.tree, device, is_varlen=is_varlen),
        labels_N=sent.labels_E,
        shared=sent,
        routing=send_fields(Routing.of_tree(cu_seqlens, shared.tree, experts_N), device),
    )
    return send_fields(rows, device)


def _cut(
    lengths_R: torch.Tensor, padding_ends: torch.Tensor, share: Share, cp_rank: int, cp_size: int
) -> Pieces:
    """Return a rank's pieces of the rows and its padding; keys lie where the gathered shares have them."""
    pieces = cut_rows(lengths_R, cp_rank, cp_size)
    assert pieces.key_source_K is not None
    start, end = (0, *padding_ends.tolist())[cp_rank : cp_rank + 2]
    padding = torch.tensor([end - start] if end > start else [], dtype=torch.long)
    key_source_K = torch.cat([pieces.key_source_K, torch.arange(start, end) + share.num_tokens])
    return Pieces(
        torch.cat([pieces.num_queries_P, padding]),
        torch.cat([pieces.num_keys_P, padding]),
        share.gathered_from_T[key_source_K],
    )


def _own_tokens(lengths_R: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Return the context-parallel rank that holds each token."""
    num_pieces = 2 * cp_size
    length_T = torch.repeat_interleave(lengths_R, lengths_R)
    starts_T = torch.repeat_interleave(lengths_R.cumsum(0) - lengths_R, lengths_R)
    position_T = torch.arange(len(length_T)) - starts_T
    # Piece k is [L·k // pieces, L·(k+1) // pieces).
    piece_T = ((position_T + 1) * num_pieces + length_T - 1) // length_T - 1
    return torch.minimum(piece_T, num_pieces - 1 - piece_T)
