"""Layout of a packed microbatch's rows, made once and shared by all layers.

Shapes: N packed positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learner.attention.layout import AttentionLayout, lay_out, lay_out_tree
from learner.attention.pieces import Pieces, whole_rows
from learner.attention.rectangles import RectanglePieces
from learner.batching.routing import Routing
from learner.batching.shared_prompts import SharedRows
from learner.numerics.transfer import send_fields


@dataclass(frozen=True, eq=False)
class Rows:
    """The layout of one microbatch.

    Attributes:
        positions_N: Position of each token within its row.
        attention: How the rows lie for the kernel of attention.
        shared: The tree that stands for the rows, where these share prompts: positions are then its own.
        routing: What routers of experts are told of the positions, if somebody asks them.
    """

    positions_N: torch.Tensor
    attention: AttentionLayout
    shared: SharedRows | None = None
    routing: Routing | None = None


def lay_out_rows(cu_seqlens: Sequence[int], device: torch.device, *, is_varlen: bool = False) -> Rows:
    """Return the layout of rows that start and end at `cu_seqlens` (ascending, at least two positions).

    Args:
        cu_seqlens: As in `PackedBatch`.
        device: Where the index tensors go.
        is_varlen: Attention is by the kernel for variable lengths.
    """
    pieces = whole_rows(cu_seqlens)
    return send_fields(Rows(_positions(pieces), lay_out(pieces, device, is_varlen=is_varlen)), device)


def lay_out_padded(cu_seqlens: Sequence[int], device: torch.device) -> Rows:
    """Return rows that are all padded to the longest: one rectangle."""
    pieces = whole_rows(cu_seqlens)
    return send_fields(Rows(_positions(pieces), RectanglePieces.of(pieces, lambda _: 0).to(device)), device)


def lay_out_shared(shared: SharedRows, device: torch.device, *, is_varlen: bool = False) -> Rows:
    """Return the layout of a tree, which goes to `device` with it."""
    attention = lay_out_tree(shared.tree, device, is_varlen=is_varlen)
    return send_fields(Rows(shared.tree.positions_M, attention, send_fields(shared, device)), device)


def _positions(pieces: Pieces) -> torch.Tensor:
    lengths_R = pieces.num_queries_P
    starts_R = lengths_R.cumsum(0) - lengths_R
    return torch.arange(int(lengths_R.sum())) - torch.repeat_interleave(starts_R, lengths_R)
