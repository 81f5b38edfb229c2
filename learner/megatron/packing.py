"""Where the rows of a packed microbatch lie, and how attention regroups them.

Owns the index tensors that turn packed positions into padded buckets and back. They are made once per
microbatch and shared by all layers. Rows never attend to one another: the invariant of this module.

Shapes: N packed positions, R rows, M padded positions over all buckets, D head size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

SHORTEST_BUCKET = 16
FORMAT = "packed_rows"
"""Not Megatron's `thd`: its unfused rotary embedding for `thd` loops over the rows in Python."""


@dataclass
class PackedRows(PackedSeqParams):
    """Handed through the model beside the tokens; read by `RowAttention` and `RowRotary`.

    Attributes:
        positions_N: Position of each token within its row.
        padded_from_M: For every padded position the packed position to read (0 where padding).
        packed_from_N: For every packed position the padded position where its output lies.
        buckets: (rows, length) of each bucket, in the order in which they follow one another in M.
    """

    positions_N: torch.Tensor | None = None
    padded_from_M: torch.Tensor | None = None
    packed_from_N: torch.Tensor | None = None
    buckets: tuple[tuple[int, int], ...] = ()


def bucket_length(num_tokens: int) -> int:
    """Return the padded length for a row: a power of two up to 64, from there in quarters of an octave.

    The waste is below one quarter for long rows, and the number of buckets stays logarithmic.
    """
    power = 1 << max(0, num_tokens - 1).bit_length()
    if power <= 64:
        return max(SHORTEST_BUCKET, power)
    quarter = power // 8
    return -(-num_tokens // quarter) * quarter


def describe_rows(cu_seqlens: list[int], device: torch.device) -> PackedRows:
    """Return the layout of rows that start and end at `cu_seqlens` (R + 1 ascending positions)."""
    starts = torch.tensor(cu_seqlens[:-1])
    lengths = torch.tensor([end - start for start, end in itertools.pairwise(cu_seqlens)])
    padded_lengths = [bucket_length(length) for length in lengths.tolist()]
    padded_from: list[torch.Tensor] = []
    packed_from_N = torch.empty(cu_seqlens[-1], dtype=torch.long)
    buckets: list[tuple[int, int]] = []
    offset = 0
    for length in sorted(set(padded_lengths)):
        rows = [row for row, padded in enumerate(padded_lengths) if padded == length]
        column_L = torch.arange(length)
        is_token_RL = column_L < lengths[rows, None]
        source_RL = torch.where(is_token_RL, starts[rows, None] + column_L, 0)
        packed_from_N[source_RL[is_token_RL]] = offset + is_token_RL.view(-1).nonzero()[:, 0]
        padded_from.append(source_RL.view(-1))
        buckets.append((len(rows), length))
        offset += len(rows) * length
    positions_N = torch.arange(cu_seqlens[-1]) - torch.repeat_interleave(starts, lengths)
    return PackedRows(
        qkv_format=FORMAT,
        positions_N=positions_N.to(device),
        padded_from_M=torch.cat(padded_from).to(device),
        packed_from_N=packed_from_N.to(device),
        buckets=tuple(buckets),
    )


class Pad(torch.autograd.Function):
    """Packed to padded: forward [N, D] -> [M, D], backward the other way.

    A padded position reads packed position 0 and gives no gradient back. That is exact because `Unpad`
    sends gradient zero to it, and causal queries before it do not see its key.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        ctx.rows = rows
        return x_ND.index_select(0, _index(rows.padded_from_M))

    @staticmethod
    def backward(ctx: Any, gradient_MD: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient_MD.index_select(0, _index(ctx.rows.packed_from_N)), None


class Unpad(torch.autograd.Function):
    """Padded to packed: forward [M, D] -> [N, D]; padding gets gradient zero."""

    @staticmethod
    def forward(ctx: Any, x_MD: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        ctx.rows, ctx.shape = rows, x_MD.shape
        return x_MD.index_select(0, _index(rows.packed_from_N))

    @staticmethod
    def backward(ctx: Any, gradient_ND: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        gradient_MD = gradient_ND.new_zeros(ctx.shape)
        return gradient_MD.index_copy_(0, _index(ctx.rows.packed_from_N), gradient_ND), None


def _index(index: torch.Tensor | None) -> torch.Tensor:
    assert index is not None, "the rows were not made by describe_rows"
    return index
