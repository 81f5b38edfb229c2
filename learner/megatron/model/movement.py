"""Movement of activations between context-parallel ranks, and sums over tensor-parallel ones.

Each function is exact in both directions. Invariant: the gradient of a token's value is the sum over all
places that read it.

Shapes: N positions of this rank, T of all context-parallel ranks, D channels.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from learner.megatron.model.packing import Share


class _WithGroup(Protocol):
    group: dist.ProcessGroup


class _WithShare(Protocol):
    share: Share


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


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' values on each rank; backward the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: _WithGroup, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _WithGroup, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
