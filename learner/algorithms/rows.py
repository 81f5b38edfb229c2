"""Sums and means over tokens and rows, in the packed layout (pure).

A padded batch [B, T] is the packed batch whose rows all have T positions: flatten it and use
`padded_rows`. Values outside the mask never enter a result, not even when they are not finite.

Shapes: N packed positions, R rows; padded: B rows, T columns, N = B * T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Sum = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor of totals over data-parallel ranks; the identity on one rank."""

EPSILON = 1e-8
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Rows:
    """Row of each packed position."""

    row_N: torch.Tensor
    num_rows: int

    def sum(self, x_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
        """Return the masked sum of each row [R]."""
        return torch.zeros(self.num_rows, device=x_N.device).index_add(0, self.row_N, masked(x_N, mask_N))

    def count(self, mask_N: torch.Tensor) -> torch.Tensor:
        """Return the number of masked-in tokens of each row [R]."""
        return torch.zeros(self.num_rows, device=mask_N.device).index_add(0, self.row_N, mask_N.float())

    def mean(self, x_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
        """Return the masked mean of each row [R]; 0 for a row without tokens."""
        return self.sum(x_N, mask_N) / (self.count(mask_N) + EPSILON)

    def spread(self, x_R: torch.Tensor) -> torch.Tensor:
        """Return each row's value at all its positions [N]."""
        return x_R.index_select(0, self.row_N)

    def max(self, x_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
        """Return the masked maximum of each row [R]; minus infinity for a row without tokens."""
        lowest_R = torch.full((self.num_rows,), -torch.inf, device=x_N.device)
        return lowest_R.scatter_reduce(0, self.row_N, torch.where(mask_N != 0, x_N, -torch.inf), "amax")

    @property
    def column_N(self) -> torch.Tensor:
        """Position of each token within its row."""
        size_R = torch.bincount(self.row_N, minlength=self.num_rows)
        start_R = size_R.cumsum(0) - size_R
        return torch.arange(len(self.row_N), device=self.row_N.device) - start_R[self.row_N]

    def remaining(self, mask_N: torch.Tensor) -> torch.Tensor:
        """Return how many masked-in tokens its row has from each position on, itself included [N]."""
        is_in_N = (mask_N != 0).long()
        count_R = torch.zeros(self.num_rows, dtype=torch.long, device=mask_N.device)
        count_R = count_R.index_add(0, self.row_N, is_in_N)
        return count_R.cumsum(0)[self.row_N] - is_in_N.cumsum(0) + is_in_N


def first_rows(episode_R: torch.Tensor) -> torch.Tensor:
    """Return the first row of each episode [E]; episodes are numbered from 0."""
    num_episodes = int(episode_R.max()) + 1 if len(episode_R) else 0
    none_E = torch.full((num_episodes,), len(episode_R))
    return none_E.scatter_reduce(0, episode_R, torch.arange(len(episode_R)), "amin")


def sum_episodes(x_R: torch.Tensor, episode_R: torch.Tensor | None) -> torch.Tensor:
    """Return for each row the sum over all rows of its episode [R]; without episodes each row is one."""
    if episode_R is None:
        return x_R
    return torch.zeros(len(x_R), device=x_R.device).index_add(0, episode_R, x_R)[episode_R]


def padded_rows(num_rows: int, num_columns: int) -> Rows:
    """Return the rows of a padded batch whose tensors were flattened."""
    return Rows(torch.arange(num_rows).repeat_interleave(num_columns), num_rows)


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return x times mask, 0 where the mask is 0 whatever x is there."""
    return torch.where(mask.bool(), x, 0.0) * mask


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


def running_sum(x_N: torch.Tensor) -> torch.Tensor:
    """Return the sums up to each position; on a GPU that is to repeat its results, the host adds."""
    if x_N.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return x_N.cpu().cumsum(0).to(x_N.device)
    return x_N.cumsum(0)


def whiten(
    x: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True, over_ranks: Sum = lambda totals: totals
) -> torch.Tensor:
    """Return (x - mean) / std over the mask, everywhere; the variance is the unbiased one.

    With fewer than two tokens there is no variance: x is only shifted. `shift_mean=False` adds the mean
    back. Moments are of all ranks where `over_ranks` sums over them.
    """
    total = over_ranks(torch.stack([masked(x, mask).sum(), mask.sum()]))
    count, mean = total[1], total[0] / (total[1] + EPSILON)
    squares = over_ranks(masked((x - mean).square(), mask).sum())
    variance = squares / (count + EPSILON) * count / (count - 1).clamp(min=1)
    scaled = (x - mean) * torch.rsqrt(torch.where(count > 1, variance, 1.0) + EPSILON)
    return scaled if shift_mean else scaled + mean


def clamp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Bound a log-ratio before `exp`."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
