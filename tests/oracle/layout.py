"""Between verl's padded tensors and our packed ones.

With `PACKED` as layout the positions after each row's last token are cut off, so that the same cases
check both layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.algorithms.rows import Rows, padded_rows


@dataclass(frozen=True)
class Layout:
    """Flattens [B, T] and back. `kept_N` tells which positions of the padded layout stay."""

    rows: Rows
    shape: tuple[int, int]
    kept_N: torch.Tensor

    def flat(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Return [N]."""
        return x_BT.reshape(-1)[self.kept_N]

    def back(self, x_N: torch.Tensor) -> torch.Tensor:
        """Return [B, T], 0 where nothing stands."""
        out = torch.zeros(self.shape[0] * self.shape[1], dtype=x_N.dtype)
        out[self.kept_N] = x_N
        return out.reshape(self.shape)


def lay_out(mask_BT: torch.Tensor, *, is_packed: bool = False) -> Layout:
    """Return the layout of a batch with this mask."""
    num_rows, num_columns = mask_BT.shape
    whole = padded_rows(num_rows, num_columns)
    kept_BT = torch.ones(mask_BT.shape, dtype=torch.bool)
    if is_packed:
        kept_BT = mask_BT.flip(1).cumsum(1).flip(1) > 0
    kept_N = kept_BT.reshape(-1)
    return Layout(Rows(whole.row_N[kept_N], num_rows), (num_rows, num_columns), kept_N)
