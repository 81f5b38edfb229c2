"""Log-prob and entropy of tokens straight from hidden states: linear layer and softmax in one function.

Owns one autograd function over tiles of tokens x vocabulary entries, forward and backward. It must
never hold more than `KEPT_ELEMENTS` logits or exponentials besides its tiles, never gather the vocabulary
of a tensor-parallel group, and rows that pad the vocabulary must never enter the softmax (unmasked they
cost 0.3 nat on a tiny model). Invariant: sums run in float32 whatever the inputs are, so the size of a
tile changes rounding only.

The exponentials of a small call are kept for the backward pass; of a large one the logits are made again
there. The vocabulary is the outer loop: a slice of the weight's gradient is finished before the next
begins, so it needs no float32 copy of the whole. Tiles are reused: on a CPU the pages of a fresh one cost
more than the arithmetic in it.

Shapes: N tokens, H hidden size, V vocabulary entries of this rank (real and padding), T tokens and
E entries of one tile, K running sums of a token (a fourth with squares).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from learner.numerics.autograd import SavedTensors
from learner.numerics.products import is_slow, multiply

TILE_ENTRIES = {"cpu": 1 << 13, "cuda": 1 << 14}
"""Vocabulary entries of a tile."""
TILE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits of a tile; about three float32 tensors of this size are alive at once."""
KEPT_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 26}
"""Float32 exponentials that a call may keep, 256 MiB: all of its logits or none."""

Kept = list[tuple[torch.Tensor, torch.Tensor]]
"""Tile by tile, entries outside: exponentials [T, E] of the logits less a maximum, and that maximum [T]."""


@dataclass(frozen=True)
class _Plan:
    """Partition of one call. `num_real` of this rank's V entries, from `first_entry` on, are no padding."""

    scale: float
    group: dist.ProcessGroup | None
    reduce_hidden_grad: bool
    first_entry: int
    num_real: int
    num_tokens: int
    tile_tokens: int
    tile_entries: int
    dtype: torch.dtype
    has_squares: bool
    is_kept: bool

    @property
    def is_split(self) -> bool:
        return self.group is not None and self.group.size() > 1

    def make_tile(self, like: torch.Tensor, is_used: bool) -> torch.Tensor | None:
        size = self.tile_tokens * self.tile_entries
        return like.new_empty(size, dtype=torch.float32) if is_used else None

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
    has_squares: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return (log-prob of the label [N], entropy [N]) of softmax(hidden @ weight.T / temperature), float32.

    With `has_squares` a third follows: the sum over the vocabulary of squared probabilities [N], without a
    gradient. Differentiable in `hidden_NH` and `weight_VH`, once. One MAX and one SUM all-reduce per call
    if the vocabulary is split.

    Args:
        hidden_NH: float32, bfloat16 or float16; the same on every rank of `group`.
        weight_VH: This rank's rows of the output projection, padding included.
        labels_N: Token ids over the whole vocabulary, 0 to `vocab_size` - 1.
        vocab_size: Real entries of the whole vocabulary; those behind are padding.
        temperature: Divisor of the sampler's logits.
        group: The tensor-parallel group that the vocabulary is split over; None if it is not.
        chunk_tokens: Tokens of a tile; 0 takes what suits the device.
        reduce_hidden_grad: Whether the backward pass sums the gradient of `hidden_NH` over `group`.
            Each rank knows the part of its own entries only. Megatron's `ColumnParallelLinear` sums in
            the backward pass of the linear function (`allreduce_dgrad`), as this does. Pass False where
            the caller's own region does it: behind `copy_to_tensor_model_parallel_region`, or behind
            `gather_from_sequence_parallel_region`, whose backward pass is a reduce-scatter.
        has_squares: Whether squared probabilities are summed too; costs one more read of each tile.
    """
    options = (chunk_tokens, reduce_hidden_grad, has_squares)
    plan = _make_plan(hidden_NH, weight_VH, vocab_size, temperature, group, *options)
    outputs: tuple[torch.Tensor, ...] = _FusedLogprobs.apply(hidden_NH, weight_VH, labels_N, plan)
    return outputs


def _make_plan(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    chunk_tokens: int,
    reduce_hidden_grad: bool,
    has_squares: bool,
) -> _Plan:
    num_tokens, num_entries = hidden_NH.shape[0], weight_VH.shape[0]
    first_entry = num_entries * group.rank() if group is not None else 0
    num_ranks = group.size() if group is not None else 1
    assert num_entries * num_ranks >= vocab_size, "the ranks' rows do not hold the whole vocabulary"
    device = hidden_NH.device.type
    tile_entries = max(1, min(num_entries, TILE_ENTRIES[device]))
    # Half precision multiplies into float32 on GPUs only; elsewhere operands are widened tile by tile.
    is_native = device == "cuda" and hidden_NH.dtype == weight_VH.dtype
    num_real = max(0, min(num_entries, vocab_size - first_entry))
    is_wanted = torch.is_grad_enabled() and (hidden_NH.requires_grad or weight_VH.requires_grad)
    return _Plan(
        scale=1.0 / temperature,
        group=group,
        reduce_hidden_grad=reduce_hidden_grad,
        first_entry=first_entry,
        num_real=num_real,
        num_tokens=num_tokens,
        tile_tokens=max(1, min(num_tokens, chunk_tokens or TILE_ELEMENTS[device] // tile_entries)),
        tile_entries=tile_entries,
        dtype=hidden_NH.dtype if is_native else torch.float32,
        has_squares=has_squares,
        is_kept=is_wanted and num_tokens * num_real <= KEPT_ELEMENTS[device],
    )


class _Context(SavedTensors, Protocol):
    plan: _Plan
    kept: Kept


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor, plan: _Plan
    ) -> tuple[torch.Tensor, ...]:
        kept: Kept = []
        max_N, sums_KN = _sum_tiles(hidden_NH, weight_VH, labels_N - plan.first_entry, plan, kept)
        if plan.is_split:
            whole_max_N = max_N.clone()
            dist.all_reduce(whole_max_N, dist.ReduceOp.MAX, group=plan.group)
            _move_maximum(sums_KN, max_N, whole_max_N)
            max_N = whole_max_N
            dist.all_reduce(sums_KN, group=plan.group)
        log_total_N = sums_KN[0].log()
        entropy_N = log_total_N - sums_KN[1] / sums_KN[0]
        log_norm_N = max_N + log_total_N
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, log_norm_N, entropy_N)
        ctx.plan, ctx.kept = plan, kept
        ctx.set_materialize_grads(False)
        logprobs_N = sums_KN[2] - log_norm_N
        if not plan.has_squares:
            return logprobs_N, entropy_N
        squares_N = sums_KN[3] / sums_KN[0].square()
        ctx.mark_non_differentiable(squares_N)
        return logprobs_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, logprob_grad_N: torch.Tensor | None, entropy_grad_N: torch.Tensor | None, *_: object
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden_NH, weight_VH, labels_N, log_norm_N, entropy_N = ctx.saved_tensors
        plan = ctx.plan
        # A caller that stacks both outputs sends zeros for an unused entropy; on a GPU to look would wait.
        if entropy_grad_N is not None and not entropy_grad_N.is_cuda and not entropy_grad_N.any():
            entropy_grad_N = None
        # Used up below: a second pass over a retained graph finds none and makes the logits again.
        kept, ctx.kept = ctx.kept[::-1], []
        tile = plan.make_tile(hidden_NH, not kept and plan.dtype is torch.float32)
        hidden_grad_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        weight_grad_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        is_in_place = weight_VH.dtype is torch.float32
        for entries in plan.entry_slices():
            weight_EH = weight_VH[entries].to(plan.dtype)
            local_N = labels_N - (plan.first_entry + entries.start)
            weight_grad_EH = None if weight_grad_VH is None else weight_grad_VH[entries]
            if weight_grad_EH is not None and not is_in_place:
                weight_grad_EH = torch.zeros_like(weight_grad_EH, dtype=torch.float32)
            for tokens in plan.token_slices():
                hidden_TH = hidden_NH[tokens].to(plan.dtype)
                if kept:
                    p_TE, max_T = kept.pop()
                    factor_T = (max_T - log_norm_N[tokens]).exp_()
                else:  # relative to the log of the normaliser a logit is a log-prob
                    p_TE = _matmul(hidden_TH, weight_EH.T, tile).mul_(plan.scale)
                    p_TE, factor_T = p_TE.sub_(log_norm_N[tokens, None]).exp_(), None
                grad_TE = _differentiate(
                    p_TE,
                    factor_T,
                    local_N[tokens],
                    entropy_N[tokens],
                    None if logprob_grad_N is None else logprob_grad_N[tokens] * plan.scale,
                    None if entropy_grad_N is None else entropy_grad_N[tokens] * plan.scale,
                ).to(plan.dtype)
                if hidden_grad_NH is not None:
                    _add_product(hidden_grad_NH[tokens], grad_TE, weight_EH)
                if weight_grad_EH is not None:
                    _add_product(weight_grad_EH, grad_TE.T, hidden_TH)
            if weight_grad_VH is not None and weight_grad_EH is not None and not is_in_place:
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
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, local_N: torch.Tensor, plan: _Plan, kept: Kept
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's maximum m [N] and [K, N]: sums of e^(x-m), e^(x-m) (x-m), label logits, e^2(x-m).

    Fills `kept` if the plan says so.
    """
    logits_tile = plan.make_tile(hidden_NH, plan.dtype is torch.float32)
    weights_tile = plan.make_tile(hidden_NH, not plan.is_kept)
    max_N = hidden_NH.new_full((plan.num_tokens,), -torch.inf, dtype=torch.float32)
    sums_KN = hidden_NH.new_zeros((3 + plan.has_squares, plan.num_tokens), dtype=torch.float32)
    for entries in plan.entry_slices():
        weight_EH = weight_VH[entries].to(plan.dtype)
        for tokens in plan.token_slices():
            logits_TE = _matmul(hidden_NH[tokens].to(plan.dtype), weight_EH.T, logits_tile)
            if plan.scale != 1.0:
                logits_TE.mul_(plan.scale)
            index_T, is_here_T = _find_labels(local_N[tokens] - entries.start, logits_TE.shape[1])
            label_T = logits_TE.gather(1, index_T[:, None])[:, 0].masked_fill_(~is_here_T, 0.0)
            max_T = torch.maximum(max_N[tokens], logits_TE.amax(1))
            _move_maximum(sums_KN[:, tokens], max_N[tokens], max_T)
            max_N[tokens] = max_T
            shifted_TE = logits_TE.sub_(max_T[:, None])
            weights_TE = torch.exp(shifted_TE, out=_cut(weights_tile, shifted_TE))
            sums_KN[0, tokens] += weights_TE.sum(1)
            if plan.has_squares:  # a norm needs no tile of its own
                sums_KN[3, tokens] += torch.linalg.vector_norm(weights_TE, dim=1).square_()
            sums_KN[1, tokens] += shifted_TE.mul_(weights_TE).sum(1)
            if plan.is_kept:
                kept.append((weights_TE, max_T))
            sums_KN[2, tokens] += label_T
    return max_N, sums_KN


def _move_maximum(sums_KN: torch.Tensor, old_N: torch.Tensor, new_N: torch.Tensor) -> None:
    """Make sums that are relative to `old_N` relative to `new_N`, in place."""
    # Nothing was summed yet where the maximum is -inf; the move must not turn 0 into NaN.
    move_N = torch.where(old_N.isneginf(), 0.0, old_N - new_N)
    factor_N = move_N.exp()
    sums_KN[1] += sums_KN[0] * move_N
    sums_KN[:2] *= factor_N
    sums_KN[3:] *= factor_N.square()


def _differentiate(
    p_TE: torch.Tensor,
    factor_T: torch.Tensor | None,
    local_T: torch.Tensor,
    entropy_T: torch.Tensor,
    logprob_grad_T: torch.Tensor | None,
    entropy_grad_T: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of the scaled logits; `p_TE`, the probabilities over `factor_T`, is used up."""
    total_T = torch.zeros_like(entropy_T) if logprob_grad_T is None else -logprob_grad_T
    if entropy_grad_T is None:
        grad_TE = p_TE.mul_((total_T if factor_T is None else total_T * factor_T)[:, None])
    else:  # dH/dx = -p (log p + H)
        if factor_T is not None:
            p_TE.mul_(factor_T[:, None])
        # The limit of p log p at 0 is 0, not NaN.
        log_TE = p_TE.clamp(min=torch.finfo(torch.float32).tiny).log_()
        log_TE.add_(entropy_T[:, None]).mul_(-entropy_grad_T[:, None]).add_(total_T[:, None])
        grad_TE = p_TE.mul_(log_TE)
    if logprob_grad_T is not None:  # dlogp(label)/dx = [label] - p
        index_T, is_here_T = _find_labels(local_T, grad_TE.shape[1])
        grad_TE.scatter_add_(1, index_T[:, None], (logprob_grad_T * is_here_T)[:, None])
    return grad_TE


def _find_labels(local_T: torch.Tensor, num_entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an index within the tile for every label, and whether the label is in the tile at all."""
    return local_T.clamp(0, num_entries - 1), (local_T >= 0) & (local_T < num_entries)


def _matmul(left: torch.Tensor, right: torch.Tensor, tile: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product in float32, in `tile` where that can be."""
    if left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    if tile is None or is_slow(left, right):
        return multiply(left, right)
    shape = (left.shape[0], right.shape[1])
    return torch.mm(left, right, out=tile[: math.prod(shape)].view(shape))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the product to the float32 `total`."""
    if left.dtype is torch.float32 and not is_slow(left, right):
        total.addmm_(left, right)
    else:
        total.add_(_matmul(left, right))


def _cut(tile: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return as much of `tile` as `like` has, or a fresh tensor."""
    return torch.empty_like(like) if tile is None else tile[: like.numel()].view_as(like)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
