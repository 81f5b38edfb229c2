"""Movement of activations between layouts: packed to padded buckets, and between context-parallel ranks.

Each function is exact in both directions; none of them computes. Invariant: the gradient of a token's
value is the sum over all places that read it.

Shapes: N positions of this rank, T of all context-parallel ranks, M padded positions, D channels.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from learner.megatron.model.packing import PackedRows, Share


class _WithRows(Protocol):
    rows: PackedRows
    shape: torch.Size


class _WithGroup(Protocol):
    group: dist.ProcessGroup


class _WithShare(Protocol):
    share: Share


class Pad(torch.autograd.Function):
    """Packed to padded: forward [N, D] -> [M, D], backward the other way.

    A padded position reads packed position 0 and gives no gradient back. That is exact because `Unpad`
    sends gradient zero to it, and causal queries before it do not see its key.
    """

    @staticmethod
    def forward(ctx: _WithRows, x_ND: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        ctx.rows = rows
        return x_ND.index_select(0, _index(rows.query_from_M))

    @staticmethod
    def backward(ctx: _WithRows, gradient_MD: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient_MD.index_select(0, _index(ctx.rows.output_from_N)), None


class Unpad(torch.autograd.Function):
    """Padded to packed: forward [M, D] -> [N, D]; padding gets gradient zero."""

    @staticmethod
    def forward(ctx: _WithRows, x_MD: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        ctx.rows, ctx.shape = rows, x_MD.shape
        return x_MD.index_select(0, _index(rows.output_from_N))

    @staticmethod
    def backward(ctx: _WithRows, gradient_ND: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient_MD = gradient_ND.new_zeros(ctx.shape)
        return gradient_MD.index_copy_(0, _index(ctx.rows.output_from_N), gradient_ND), None


class GatherKeys(torch.autograd.Function):
    """Shares of all ranks, one after another: forward [N, D] -> [T, D]; backward sums and scatters."""

    @staticmethod
    def forward(ctx: _WithGroup, x_ND: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered_TD = x_ND.new_empty((group.size() * x_ND.shape[0], *x_ND.shape[1:]))
        dist.all_gather_into_tensor(gathered_TD, x_ND.contiguous(), group=group)
        return gathered_TD

    @staticmethod
    def backward(ctx: _WithGroup, gradient_TD: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = gradient_TD.shape[0] // ctx.group.size()
        gradient_ND = gradient_TD.new_empty((size, *gradient_TD.shape[1:]))
        dist.reduce_scatter_tensor(gradient_ND, gradient_TD.contiguous(), group=ctx.group)
        return gradient_ND, None


class GatherOutputs(torch.autograd.Function):
    """The heads' outputs of whole rows on every rank: forward [C, N] -> [C, num_tokens].

    What follows is computed alike on every rank, so each takes back the gradient of its own tokens only.
    """

    @staticmethod
    def forward(ctx: _WithShare, x_CN: torch.Tensor, share: Share, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.share = share
        gathered_TC = x_CN.new_empty((group.size() * x_CN.shape[1], x_CN.shape[0]))
        dist.all_gather_into_tensor(gathered_TC, x_CN.T.contiguous(), group=group)
        return gathered_TC[share.gathered_from_T[: share.num_tokens]].T.contiguous()

    @staticmethod
    def backward(ctx: _WithShare, gradient_CT: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.share.take(gradient_CT), None, None


def _index(index: torch.Tensor | None) -> torch.Tensor:
    assert index is not None, "the rows were not made by describe_rows"
    return index
