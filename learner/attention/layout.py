"""Choice of the kernel that attends within packed rows: torch's variable-length one where it runs."""

from __future__ import annotations

from typing import TypeAlias

import torch

from learner.attention.pieces import Pieces
from learner.attention.rectangles import RectanglePieces
from learner.attention.varlen import VarlenPieces
from learner.numerics.transfer import send_fields

AttentionLayout: TypeAlias = RectanglePieces | VarlenPieces


def lay_out(pieces: Pieces, device: torch.device, *, is_varlen: bool) -> AttentionLayout:
    """Return how `pieces` lie for the kernel that `varlen.can_run` chose, on `device`."""
    if is_varlen:
        return send_fields(VarlenPieces.of(pieces), device)
    return RectanglePieces.of(pieces).to(device)
