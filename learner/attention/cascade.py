"""Attention over a prefix tree as a cascade: a call of the kernel for each part of the keys, merged.

A part's softmax is over its own keys; the parts of a query are merged by their log-sum-exp. The backward pass
calls the kernel's own with the merged output and log-sum-exp: its probabilities exp(score - log-sum-exp) and
its sums of output times gradient are then those of the whole softmax, so that each call gives its exact part.
Nothing is masked and no key is repeated; the sum over the rows that share a key is inside the kernel.

Shapes: M positions of the tree, L positions in segments with nothing below, P padded ones of these, h query
heads, g key/value heads, D head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from learner.attention.pieces import Pieces, runs
from learner.attention.prefix_tree import PrefixTree, Segment
from learner.attention.rectangles import RectanglePieces
from learner.numerics.autograd import SavedTensors

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [M, h, D], keys and values [M, g, D], or their gradients."""
Merged = tuple[torch.Tensor, torch.Tensor]
"""Outputs [M, h, D], and the log-sum-exp of each query's scores [M, h]."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Cascade:
    """A form of the tree for one kernel, whose two calls it makes."""

    def attend(
        self,
        query_MhD: torch.Tensor,
        key_MgD: torch.Tensor,
        value_MgD: torch.Tensor,
        scale: float | None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the outputs [M, h, D]; see `RectanglePieces.attend`.

        Raises:
            NotImplementedError: There is a window, or queries and values have heads of different sizes.
        """
        if window is not None or query_MhD.shape[-1] != value_MgD.shape[-1]:
            raise NotImplementedError(
                "no prefix tree for a sliding window, or for values of another head size"
            )
        output_MhD: torch.Tensor = _Attend.apply(query_MhD, key_MgD, value_MgD, self, scale)
        return output_MhD

    @abstractmethod
    def forward(self, heads: Heads, scale: float | None) -> Merged:
        """Return the outputs, and the log-sum-exp of each query's scores."""

    @abstractmethod
    def backward(
        self, gradient_MhD: torch.Tensor, heads: Heads, merged: Merged, scale: float | None
    ) -> Heads:
        """Return the gradients of `heads`, given that of the outputs and what `forward` returned."""


@dataclass(frozen=True, eq=False)
class CpuCascade(Cascade):
    """The tree for the CPU's kernel, whose causal mask lets query i see keys 0 to i, however many there are.

    A segment with others below is one call, of its own queries and of all below it with its keys. The others,
    which are many and alike, go in padded rectangles.

    Attributes:
        inner: Segments with others below.
        leaves: The layout of the other segments, of L packed positions.
        tree_from_L: Where these lie in the tree.
        run: Their places, if they are a run of the tree that is not padded: nothing is moved then.
    """

    inner: tuple[Segment, ...]
    leaves: RectanglePieces
    tree_from_L: torch.Tensor
    run: slice | None

    @classmethod
    def of(cls, tree: PrefixTree) -> CpuCascade:
        """Return the form of `tree`."""
        leaves = [segment for segment in tree.segments if segment.below == segment.end]
        inner = tuple(segment for segment in tree.segments if segment.below > segment.end)
        lengths, starts = (
            torch.tensor(column) for column in zip(*((s.end - s.start, s.start) for s in leaves), strict=True)
        )
        layout = RectanglePieces.of(Pieces(lengths, lengths))
        tree_from_L = runs(starts, lengths)
        first, is_run = leaves[0].start, leaves[-1].end - leaves[0].start == len(tree_from_L)
        run = slice(first, first + len(tree_from_L)) if is_run and layout.is_in_order else None
        return cls(inner, layout, tree_from_L, run)

    def forward(self, heads: Heads, scale: float | None) -> Merged:
        output_MhD = torch.empty_like(heads[0], memory_format=torch.contiguous_format)
        lse_Mh = heads[0].new_empty(heads[0].shape[:2], dtype=_lse_dtype(heads[0]))
        found = [
            _flatten(_flash(*_lines(lines, num_lines), 0.0, True, scale=scale))
            for num_lines, lines in self._rectangles(*map(self._pad, heads))
        ]
        for whole, parts in zip((output_MhD, lse_Mh), zip(*found, strict=True), strict=True):
            self._write(whole, torch.cat(parts) if len(parts) > 1 else parts[0])
        for start, end, below, _ in reversed(self.inner):  # what is below is complete, but for keys above it
            one = _lines((heads[0][start:below], *(x[start:end] for x in heads[1:])), 1)
            part, lse = _flatten(_flash(*one, 0.0, True, scale=scale))
            size = end - start
            output_MhD[start:end], lse_Mh[start:end] = part[:size], lse[:size]
            merge_part(output_MhD[end:below], lse_Mh[end:below], part[size:], lse[size:])
        return output_MhD, lse_Mh

    def backward(
        self, gradient_MhD: torch.Tensor, heads: Heads, merged: Merged, scale: float | None
    ) -> Heads:
        """A padded query has gradient 0, and probability 0 of each key."""
        output_MhD, lse_Mh = merged
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in heads)
        padded = (self._fill(gradient_MhD, 0.0), *map(self._pad, (*heads, output_MhD)))
        lse_Ph = self._fill(lse_Mh, torch.inf)
        found = [
            _flatten(self._backward_lines(_lines(lines, num_lines), scale))
            for num_lines, lines in self._rectangles(*padded, lse_Ph)
        ]
        for whole, parts in zip(grads, zip(*found, strict=True), strict=True):
            self._write(whole, torch.cat(parts) if len(parts) > 1 else parts[0])
        for start, end, below, _ in reversed(self.inner):
            queries, keys = slice(start, below), slice(start, end)
            cut = (gradient_MhD[queries], heads[0][queries], heads[1][keys], heads[2][keys])
            lines = _lines((*cut, output_MhD[queries], lse_Mh[queries]), 1)
            query, *others = _flatten(self._backward_lines(lines, scale))
            grads[0][start:end] = query[: end - start]
            grads[0][end:below] += query[end - start :]
            for whole, part in zip(grads[1:], others, strict=True):
                whole[start:end] = part
        return grads  # type: ignore[return-value]

    @staticmethod
    def _backward_lines(lines: list[torch.Tensor], scale: float | None) -> Heads:
        *tensors, lse = lines
        grads: Heads = _flash_backward(*tensors, lse.contiguous(), 0.0, True, scale=scale)
        return grads

    def _rectangles(self, *padded: torch.Tensor) -> Iterator[tuple[int, list[torch.Tensor]]]:
        start = 0
        for rectangle in self.leaves.rectangles:
            end = start + rectangle.num_lines * rectangle.num_queries
            yield rectangle.num_lines, [x_P[start:end] for x_P in padded]
            start = end

    def _pad(self, x_M: torch.Tensor) -> torch.Tensor:
        return x_M[self.run] if self.run else x_M.index_select(0, self.tree_from_L[self.leaves.query_from_M])

    def _fill(self, x_M: torch.Tensor, padding: float) -> torch.Tensor:
        """As `_pad`, with `padding` where there is nothing."""
        if self.run:
            return x_M[self.run]
        x_P = x_M.new_full((len(self.leaves.query_from_M), *x_M.shape[1:]), padding)
        return x_P.index_copy_(0, self.leaves.output_from_N, x_M.index_select(0, self.tree_from_L))

    def _write(self, whole_M: torch.Tensor, x_P: torch.Tensor) -> None:
        if self.run:
            whole_M[self.run] = x_P
        else:
            whole_M.index_copy_(0, self.tree_from_L, x_P.index_select(0, self.leaves.output_from_N))


def merge_part(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Take the outputs `other` over further keys into `output`, in place; shapes [..., D] and [...]."""
    share = torch.sigmoid(other_lse - lse)[..., None]
    torch.logaddexp(lse, other_lse, out=lse)
    output.copy_(torch.lerp(output.to(share.dtype), other.to(share.dtype), share))


def _lines(tensors: Sequence[torch.Tensor], num_lines: int) -> list[torch.Tensor]:
    """Return [lines * length, heads, ...] as the kernel has them, [lines, heads, length, ...]."""
    return [x.unflatten(0, (num_lines, -1)).transpose(1, 2) for x in tensors]


def _flatten(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.transpose(1, 2).flatten(0, 1) for x in tensors]


def _lse_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32


class _Context(SavedTensors, Protocol):
    cascade: Cascade
    scale: float | None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cascade: Cascade,
        scale: float | None,
    ) -> torch.Tensor:
        output, lse = cascade.forward((query, key, value), scale)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.cascade, ctx.scale = cascade, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *merged = ctx.saved_tensors
        grads = ctx.cascade.backward(gradient, (query, key, value), (merged[0], merged[1]), ctx.scale)
        return (*grads, None, None)
