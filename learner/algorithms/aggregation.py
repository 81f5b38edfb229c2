"""Aggregation of the loss per token to the loss of a minibatch (pure).

Every mode divides by numbers of the whole minibatch, so the parts over any cut into microbatches of
whole rows, or over ranks, sum to the whole. The denominators count tokens as they were before any
was masked for age or rejected: rejecting does not raise the step size of the rest.

Shapes: N packed positions.
"""

from __future__ import annotations

import torch

from learner.algorithms.rows import EPSILON, Rows, masked

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def aggregate(
    loss_N: torch.Tensor,
    mask_N: torch.Tensor,
    rows: Rows,
    mode: str,
    *,
    num_tokens: float,
    num_rows: float,
    counted_N: torch.Tensor | None = None,
    loss_scale: float = 1.0,
    share_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this part's share of the minibatch loss.

    Args:
        loss_N: Loss per token.
        mask_N: Tokens that are trained.
        rows: Rows of this part, all whole.
        mode: One of `MODES`.
        num_tokens: Tokens that the minibatch counts.
        num_rows: Rows that the minibatch counts.
        counted_N: Tokens that count towards a row's length; `mask_N` if not given.
        loss_scale: The constant length of Dr.GRPO, for seq-mean-token-sum-norm.
        share_R: Share of each row in the tokens of its episode, for seq-mean-token-mean; 1 if not given.
    """
    assert mode in MODES, mode
    if mode == "seq-mean-token-mean":
        counted_R = rows.count(mask_N if counted_N is None else counted_N)
        mean_R = rows.sum(loss_N, mask_N) / (counted_R + EPSILON)
        return (mean_R if share_R is None else mean_R * share_R).sum() / max(num_rows, 1.0)
    total = masked(loss_N, mask_N).sum()
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        return total / max(num_tokens, 1.0)
    return total / max(num_rows, 1.0) / (loss_scale if mode == "seq-mean-token-sum-norm" else 1.0)


def aggregate_rows(loss_R: torch.Tensor, num_rows: float) -> torch.Tensor:
    """Return this part's share of the mean of a loss per row: for losses without one per token."""
    return loss_R.sum() / max(num_rows, 1.0)


def find_divisor(mode: str, *, num_tokens: float, num_rows: float) -> float:
    """Return what `aggregate` divides by under `mode`, one of `MODES` or any mean over rows."""
    if mode == "token-sum":
        return 1.0
    return max(num_tokens if mode == "token-mean" else num_rows, 1.0)
