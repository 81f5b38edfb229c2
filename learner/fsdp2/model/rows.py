"""Layout of a packed microbatch's rows in padded rectangles, and the way there and back.

Owns the index tensors; they are made once per microbatch and shared by all layers. Invariant: a row's
tokens lie in one line of one rectangle, from its left edge, so that under a causal mask rows never see
one another and no token sees padding.

Shapes: N packed positions, M padded positions over all rectangles, D any further dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

SHORTEST_LINE = 16


@dataclass(frozen=True, eq=False)
class Rows:
    """The layout of one microbatch.

    Attributes:
        positions_N: Position of each token within its row.
        padded_from_M: For every padded position the packed position to read (0 where padding).
        packed_from_N: For every packed position the padded position where it lies.
        rectangles: (lines, length) of each rectangle, in the order in which they follow one another in M.
    """

    positions_N: torch.Tensor
    padded_from_M: torch.Tensor
    packed_from_N: torch.Tensor
    rectangles: tuple[tuple[int, int], ...]


def line_length(num_tokens: int) -> int:
    """Return the padded length of a row: a power of two up to 64, then in quarters of an octave.

    Long rows waste less than a quarter, and there are few rectangles: each costs a call per layer.
    """
    octave = 1 << max(0, num_tokens - 1).bit_length()
    if octave <= 64:
        return max(SHORTEST_LINE, octave)
    quarter = octave // 8
    return -(-num_tokens // quarter) * quarter


def lay_out_rows(cu_seqlens: Sequence[int], device: torch.device, *, one_rectangle: bool = False) -> Rows:
    """Return the layout of rows that start and end at `cu_seqlens` (ascending, at least two positions).

    Args:
        cu_seqlens: As in `PackedBatch`.
        device: Where the index tensors go.
        one_rectangle: All rows in one rectangle as long as the longest, instead of one per line length.
    """
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    longest = max(lengths)
    line_lengths = [longest if one_rectangle else line_length(length) for length in lengths]
    starts_R, lengths_R = torch.tensor(cu_seqlens[:-1]), torch.tensor(lengths)
    packed_from_N = torch.empty(cu_seqlens[-1], dtype=torch.long)
    sources: list[torch.Tensor] = []
    rectangles: list[tuple[int, int]] = []
    offset = 0
    for length in sorted(set(line_lengths)):
        rows = [row for row, line in enumerate(line_lengths) if line == length]
        column_L = torch.arange(length)
        is_token_RL = column_L < lengths_R[rows, None]
        source_RL = torch.where(is_token_RL, starts_R[rows, None] + column_L, 0)
        packed_from_N[source_RL[is_token_RL]] = offset + is_token_RL.flatten().nonzero()[:, 0]
        sources.append(source_RL.flatten())
        rectangles.append((len(rows), length))
        offset += len(rows) * length
    positions_N = torch.arange(cu_seqlens[-1]) - torch.repeat_interleave(starts_R, lengths_R)
    return Rows(
        positions_N.to(device),
        torch.cat(sources).to(device),
        packed_from_N.to(device),
        tuple(rectangles),
    )


class _Context(Protocol):
    rows: Rows
    num_padded: int


class Pad(torch.autograd.Function):
    """Packed to padded: [N, D] -> [M, D].

    Padding reads position 0 and gives it no gradient: exact, because nothing that counts depends on
    padding. The backward pass gathers, where that of a plain `index_select` would add up.
    """

    @staticmethod
    def forward(ctx: _Context, x_ND: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return x_ND.index_select(0, rows.padded_from_M)

    @staticmethod
    def backward(ctx: _Context, gradient_MD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient_MD.index_select(0, ctx.rows.packed_from_N), None


class Unpad(torch.autograd.Function):
    """Padded to packed: [M, D] -> [N, D]; padding gets gradient zero."""

    @staticmethod
    def forward(ctx: _Context, x_MD: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows, ctx.num_padded = rows, len(x_MD)
        return x_MD.index_select(0, rows.packed_from_N)

    @staticmethod
    def backward(ctx: _Context, gradient_ND: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient_MD = gradient_ND.new_zeros((ctx.num_padded, *gradient_ND.shape[1:]))
        return gradient_MD.index_copy_(0, ctx.rows.packed_from_N, gradient_ND), None
