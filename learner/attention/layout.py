"""Choice of the kernel that attends within packed rows, or over their tree."""

from __future__ import annotations

from typing import TypeAlias

import torch

from learner.attention.cascade import CpuCascade
from learner.attention.cascade_varlen import VarlenCascade
from learner.attention.pieces import Pieces
from learner.attention.prefix_tree import PrefixTree
from learner.attention.rectangles import RectanglePieces
from learner.attention.varlen import VarlenPieces
from learner.numerics.transfer import send_fields

AttentionLayout: TypeAlias = RectanglePieces | VarlenPieces | CpuCascade | VarlenCascade


def lay_out(pieces: Pieces, device: torch.device, *, is_varlen: bool) -> AttentionLayout:
    """Return how `pieces` lie for the kernel that `varlen.can_run` chose, on `device`."""
    if is_varlen:
        return send_fields(VarlenPieces.of(pieces), device)
    return RectanglePieces.of(pieces).to(device)


def lay_out_tree(tree: PrefixTree, device: torch.device, *, is_varlen: bool) -> AttentionLayout:
    """As `lay_out`, for the positions of a tree; on a GPU `is_varlen` must be true."""
    return VarlenCascade.of(tree, device) if is_varlen else CpuCascade.of(tree)
