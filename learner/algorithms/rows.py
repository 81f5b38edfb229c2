"""Sums and means over tokens and rows, in the packed layout (pure).

A padded batch [B, T] is the packed batch whose rows all have T positions: flatten it and use
`padded_rows`. Values outside the mask never enter a result, not even when they are not finite.

Shapes: N packed positions, R rows; padded: B rows, T columns, N = B * T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

EPSILON = 1e-8
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Rows:
    """Which row each packed position belongs to."""

    row_N: torch.Tensor
    num_rows: int

    def sum(self, x_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
        """Return the masked sum of each row [R]."""
        return torch.zeros(self.num_rows, device=x_N.device).index_add(0, self.row_N, masked(x_N, mask_N))

    def count(self, mask_N: torch.Tensor) -> torch.Tensor:
        """Return the number of masked-in tokens of each row [R]."""
        return self.sum(torch.ones_like(mask_N), mask_N)

    def mean(self, x_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
        """Return the masked mean of each row [R]; 0 for a row without tokens."""
        return self.sum(x_N, mask_N) / (self.count(mask_N) + EPSILON)

    def spread(self, x_R: torch.Tensor) -> torch.Tensor:
        """Return each row's value at all its positions [N]."""
        return x_R[self.row_N]


def padded_rows(num_rows: int, num_columns: int) -> Rows:
    """Return the rows of a padded batch whose tensors were flattened."""
    return Rows(torch.arange(num_rows).repeat_interleave(num_columns), num_rows)


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return x times mask, 0 where the mask is 0 whatever x is there."""
    return torch.where(mask != 0, x, 0.0) * mask


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the mask; 0 if it is empty."""
    return masked(x, mask).sum() / (mask.sum() + EPSILON)


def masked_max(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the maximum over the mask; minus infinity if it is empty."""
    floor = x.new_full((1,), -torch.inf)
    return torch.cat([torch.where(mask != 0, x, -torch.inf).reshape(-1), floor]).amax()


def masked_min(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the minimum over the mask; infinity if it is empty."""
    return -masked_max(-x, mask)


def clamp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Bound a log-ratio before `exp`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
