"""Log-prob and entropy of tokens straight from hidden states: linear layer and softmax in one function.

Owns one autograd function over tiles of tokens x vocabulary entries, forward and backward. It must
never hold the logits of all tokens at once, never gather the vocabulary of a tensor-parallel group,
and rows that pad the vocabulary must never enter the softmax (unmasked they cost 0.3 nat on a tiny
model). Invariant: sums run in float32 whatever the inputs are, so the size of a tile changes rounding only.

The logits are made again in the backward pass. The vocabulary is the outer loop there: a slice of the
weight's gradient is finished before the next begins, so it needs no float32 copy of the whole.

Shapes: N tokens, H hidden size, V vocabulary entries of this rank (real and padding), T tokens and
E entries of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

TILE_ENTRIES = {"cpu": 1 << 13, "cuda": 1 << 14}
"""Vocabulary entries of a tile."""
TILE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits of a tile; about three float32 tensors of this size are alive at once."""


@dataclass(frozen=True)
class _Plan:
    """How one call is cut. `num_real` of this rank's V entries, from `first_entry` on, are no padding."""

    scale: float
    group: dist.ProcessGroup | None
    reduce_hidden_grad: bool
    first_entry: int
    num_real: int
    num_tokens: int
    tile_tokens: int
    tile_entries: int
    dtype: torch.dtype

    @property
    def is_split(self) -> bool:
        return self.group is not None and self.group.size() > 1

    def token_slices(self) -> Iterator[slice]:
        return _slices(self.num_tokens, self.tile_tokens)

    def entry_slices(self) -> Iterator[slice]:
        return _slices(self.num_real, self.tile_entries)


def fused_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    chunk_tokens: int = 0,
    reduce_hidden_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-prob of the label [N], entropy [N]) of softmax(hidden @ weight.T / temperature), float32.

    Differentiable in `hidden_NH` and `weight_VH`, once. One MAX and one SUM all-reduce per call if the
    vocabulary is split.

    Args:
        hidden_NH: float32, bfloat16 or float16; the same on every rank of `group`.
        weight_VH: This rank's rows of the output projection, padding included.
        labels_N: Token ids over the whole vocabulary, 0 to `vocab_size` - 1.
        vocab_size: Real entries of the whole vocabulary; those behind are padding.
        temperature: What the sampler divided its logits by.
        group: The tensor-parallel group that the vocabulary is split over; None if it is not.
        chunk_tokens: Tokens of a tile; 0 takes what suits the device.
        reduce_hidden_grad: Whether the backward pass sums the gradient of `hidden_NH` over `group`.
            Each rank knows the part of its own entries only. Megatron's `ColumnParallelLinear` sums in
            the backward pass of the linear function (`allreduce_dgrad`), as this does. Pass False where
            the caller's own region does it: behind `copy_to_tensor_model_parallel_region`, or behind
            `gather_from_sequence_parallel_region`, whose backward pass is a reduce-scatter.
    """
    plan = _make_plan(hidden_NH, weight_VH, vocab_size, temperature, group, chunk_tokens, reduce_hidden_grad)
    logprobs_N, entropy_N = _FusedLogprobs.apply(hidden_NH, weight_VH, labels_N, plan)
    return logprobs_N, entropy_N


def _make_plan(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    chunk_tokens: int,
    reduce_hidden_grad: bool,
) -> _Plan:
    num_tokens, num_entries = hidden_NH.shape[0], weight_VH.shape[0]
    first_entry = num_entries * group.rank() if group is not None else 0
    num_ranks = group.size() if group is not None else 1
    assert num_entries * num_ranks >= vocab_size, "the ranks' rows do not hold the whole vocabulary"
    device = hidden_NH.device.type
    tile_entries = max(1, min(num_entries, TILE_ENTRIES[device]))
    # Half precision multiplies into float32 on GPUs only; elsewhere operands are widened tile by tile.
    is_native = device == "cuda" and hidden_NH.dtype == weight_VH.dtype
    return _Plan(
        scale=1.0 / temperature,
        group=group,
        reduce_hidden_grad=reduce_hidden_grad,
        first_entry=first_entry,
        num_real=max(0, min(num_entries, vocab_size - first_entry)),
        num_tokens=num_tokens,
        tile_tokens=chunk_tokens or max(1, TILE_ELEMENTS[device] // tile_entries),
        tile_entries=tile_entries,
        dtype=hidden_NH.dtype if is_native else torch.float32,
    )


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        max_N, sums_3N = _sum_tiles(hidden_NH, weight_VH, labels_N - plan.first_entry, plan)
        if plan.is_split:
            whole_max_N = max_N.clone()
            dist.all_reduce(whole_max_N, dist.ReduceOp.MAX, group=plan.group)
            _move_maximum(sums_3N, max_N, whole_max_N)
            max_N = whole_max_N
            dist.all_reduce(sums_3N, group=plan.group)
        log_total_N = sums_3N[0].log()
        entropy_N = log_total_N - sums_3N[1] / sums_3N[0]
        log_norm_N = max_N + log_total_N
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, log_norm_N, entropy_N)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return sums_3N[2] - log_norm_N, entropy_N

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, logprob_grad_N: torch.Tensor | None, entropy_grad_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden_NH, weight_VH, labels_N, log_norm_N, entropy_N = ctx.saved_tensors
        plan: _Plan = ctx.plan
        # A caller that stacks both outputs sends zeros for an unused entropy; on a GPU to look would wait.
        if entropy_grad_N is not None and not entropy_grad_N.is_cuda and not entropy_grad_N.any():
            entropy_grad_N = None
        hidden_grad_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        weight_grad_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        for entries in plan.entry_slices():
            weight_EH = weight_VH[entries].to(plan.dtype)
            local_N = labels_N - (plan.first_entry + entries.start)
            weight_grad_EH = torch.zeros_like(weight_EH, dtype=torch.float32)
            for tokens in plan.token_slices():
                hidden_TH = hidden_NH[tokens].to(plan.dtype)
                # Relative to the log of the normaliser a logit is a log-prob.
                logp_TE = _matmul(hidden_TH, weight_EH.T).mul_(plan.scale).sub_(log_norm_N[tokens, None])
                grad_TE = _differentiate(
                    logp_TE,
                    local_N[tokens],
                    entropy_N[tokens],
                    None if logprob_grad_N is None else logprob_grad_N[tokens],
                    None if entropy_grad_N is None else entropy_grad_N[tokens],
                )
                del logp_TE
                grad_TE = grad_TE.mul_(plan.scale).to(plan.dtype)
                if hidden_grad_NH is not None:
                    hidden_grad_NH[tokens] += _matmul(grad_TE, weight_EH)
                if weight_grad_VH is not None:
                    weight_grad_EH += _matmul(grad_TE.T, hidden_TH)
            if weight_grad_VH is not None:
                weight_grad_VH[entries] = weight_grad_EH
        if hidden_grad_NH is not None and plan.is_split and plan.reduce_hidden_grad:
            dist.all_reduce(hidden_grad_NH, group=plan.group)
        return (
            None if hidden_grad_NH is None else hidden_grad_NH.to(hidden_NH.dtype),
            weight_grad_VH,
            None,
            None,
        )


def _sum_tiles(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, local_N: torch.Tensor, plan: _Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's maximum m [N] and [3, N]: the sums of e^(x-m), e^(x-m) (x-m), label logits."""
    max_N = hidden_NH.new_full((plan.num_tokens,), -torch.inf, dtype=torch.float32)
    sums_3N = hidden_NH.new_zeros((3, plan.num_tokens), dtype=torch.float32)
    for entries in plan.entry_slices():
        weight_EH = weight_VH[entries].to(plan.dtype)
        for tokens in plan.token_slices():
            logits_TE = _matmul(hidden_NH[tokens].to(plan.dtype), weight_EH.T).mul_(plan.scale)
            index_T, is_here_T = _find_labels(local_N[tokens] - entries.start, logits_TE.shape[1])
            label_T = logits_TE.gather(1, index_T[:, None])[:, 0].masked_fill_(~is_here_T, 0.0)
            max_T = torch.maximum(max_N[tokens], logits_TE.amax(1))
            _move_maximum(sums_3N[:, tokens], max_N[tokens], max_T)
            max_N[tokens] = max_T
            shifted_TE = logits_TE.sub_(max_T[:, None])
            weights_TE = shifted_TE.exp()
            sums_3N[0, tokens] += weights_TE.sum(1)
            sums_3N[1, tokens] += weights_TE.mul_(shifted_TE).sum(1)
            sums_3N[2, tokens] += label_T
    return max_N, sums_3N


def _move_maximum(sums_3N: torch.Tensor, old_N: torch.Tensor, new_N: torch.Tensor) -> None:
    """Make sums that are relative to `old_N` relative to `new_N`, in place."""
    # Nothing was summed yet where the maximum is -inf; the move must not turn 0 into NaN.
    move_N = torch.where(old_N.isneginf(), 0.0, old_N - new_N)
    factor_N = move_N.exp()
    sums_3N[1] += sums_3N[0] * move_N
    sums_3N[:2] *= factor_N


def _differentiate(
    logp_TE: torch.Tensor,
    local_T: torch.Tensor,
    entropy_T: torch.Tensor,
    logprob_grad_T: torch.Tensor | None,
    entropy_grad_T: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of the scaled logits; `logp_TE` is used up."""
    grad_TE = logp_TE.exp().neg_()
    if entropy_grad_T is None:
        factor = logp_TE.zero_() if logprob_grad_T is None else logprob_grad_T[:, None]
    else:  # dH/dx = -p (log p + H)
        factor = logp_TE.add_(entropy_T[:, None]).mul_(entropy_grad_T[:, None])
        if logprob_grad_T is not None:
            factor.add_(logprob_grad_T[:, None])
    grad_TE.mul_(factor)
    if logprob_grad_T is not None:  # dlogp(label)/dx = [label] - p
        index_T, is_here_T = _find_labels(local_T, grad_TE.shape[1])
        grad_TE.scatter_add_(1, index_T[:, None], (logprob_grad_T * is_here_T)[:, None])
    return grad_TE


def _find_labels(local_T: torch.Tensor, num_entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an index within the tile for every label, and whether the label is in the tile at all."""
    return local_T.clamp(0, num_entries - 1), (local_T >= 0) & (local_T < num_entries)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product in float32."""
    return left @ right if left.dtype is torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
