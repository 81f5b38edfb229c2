"""Padded rectangles of pieces of similar length, for scaled dot-product attention.

Owns the index tensors that turn packed positions into padded ones and back; they are made once per microbatch
and shared by all layers. It must never compute piece by piece: thousands of short rows are normal. Invariant:
a piece's tokens lie in one line of one rectangle, from its left edge, so that none that counts sees padding.

Shapes: P pieces, N queries, K keys, T keys that are handed in, M padded queries and L padded keys over all
rectangles, h query heads, g key/value heads, D head size, Q padded queries and W padded keys of a line.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from learner.attention.pieces import Pieces
from learner.numerics.transfer import send_fields

SHORTEST_LINE = 16
GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which makes and keeps a plan per shape: 55 to 400 ms (flashinfer #5245, sglang #4650)."""


@dataclass(frozen=True)
class Rectangle:
    """Pieces of similar length. `mask` [lines, 1, Q, W] is True where a query sees a key; None: causal."""

    num_lines: int
    num_queries: int
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class RectanglePieces:
    """The layout of one microbatch.

    Attributes:
        query_from_M: For every padded query the position to read (0 where padding).
        output_from_N: For every position the padded query where it lies.
        key_from_L: For every padded key the position to read; None where keys lie as the queries do.
        is_in_order: Every padded place is the position of the same number: there is nothing to move.
    """

    query_from_M: torch.Tensor
    output_from_N: torch.Tensor
    key_from_L: torch.Tensor | None
    is_in_order: bool
    rectangles: tuple[Rectangle, ...]

    @classmethod
    def of(cls, pieces: Pieces, length_of: Callable[[int], int] | None = None) -> RectanglePieces:
        """Return the layout of `pieces`, on the CPU; pieces of one `length_of(keys)` share a rectangle."""
        num_queries_P, num_keys_P, source_K = pieces.num_queries_P, pieces.num_keys_P, pieces.key_source_K
        length_of = length_of or line_length
        line_P = torch.tensor([length_of(count) for count in num_keys_P.tolist()])
        query_start_P, key_start_P = (
            counts_P.cumsum(0) - counts_P for counts_P in (num_queries_P, num_keys_P)
        )
        output_from_N = torch.empty(int(num_queries_P.sum()), dtype=torch.long)
        queries, keys, rectangles, offset = [], [], [], 0
        for length in line_P.unique().tolist():
            (members,) = torch.nonzero(line_P == length, as_tuple=True)
            query_PQ, is_query_PQ = _spread(query_start_P[members], num_queries_P[members])
            key_PW, _ = _spread(key_start_P[members], num_keys_P[members])
            output_from_N[query_PQ[is_query_PQ]] = offset + is_query_PQ.flatten().nonzero()[:, 0]
            mask = None if source_K is None else _mask(num_queries_P[members], num_keys_P[members])
            rectangles.append(Rectangle(len(members), query_PQ.shape[1], key_PW.shape[1], mask))
            queries.append(query_PQ.flatten())
            keys.append(key_PW.flatten())
            offset += query_PQ.numel()
        query_from_M = torch.cat(queries)
        key_from_L = None if source_K is None else source_K[torch.cat(keys)]
        is_in_order = key_from_L is None and torch.equal(query_from_M, torch.arange(len(output_from_N)))
        return cls(query_from_M, output_from_N, key_from_L, is_in_order, tuple(rectangles))

    def to(self, device: torch.device) -> RectanglePieces:
        """Return the layout with its tensors on `device`."""
        rectangles = tuple(send_fields(rectangle, device) for rectangle in self.rectangles)
        return dataclasses.replace(send_fields(self, device), rectangles=rectangles)

    def attend(
        self,
        query_NhD: torch.Tensor,
        key_TgD: torch.Tensor,
        value_TgD: torch.Tensor,
        scale: float | None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the outputs [N, h, D].

        Args:
            scale: Of the scores; None for 1 / sqrt(D).
            window: Keys that a query sees: itself and the `window - 1` before it; None for all.
        """
        query_MhD = self.pad(query_NhD)
        key_LgD, value_LgD = (self._pad_keys(x) for x in (key_TgD, value_TgD))
        outputs, query_start, key_start = [], 0, 0
        for rectangle in self.rectangles:
            query_end = query_start + rectangle.num_lines * rectangle.num_queries
            key_end = key_start + rectangle.num_lines * rectangle.num_keys
            lines = (
                query_MhD[query_start:query_end],
                key_LgD[key_start:key_end],
                value_LgD[key_start:key_end],
            )
            outputs.append(_attend_lines(rectangle, *lines, scale, window))
            query_start, key_start = query_end, key_end
        return self.unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs))

    def pad(self, x_N: torch.Tensor) -> torch.Tensor:
        """Return [N, ...] as [M, ...]."""
        padded_M: torch.Tensor = x_N if self.is_in_order else _Pad.apply(x_N, self)
        return padded_M

    def unpad(self, x_M: torch.Tensor) -> torch.Tensor:
        """Return [M, ...] as [N, ...]."""
        packed_N: torch.Tensor = x_M if self.is_in_order else _Unpad.apply(x_M, self)
        return packed_N

    def _pad_keys(self, x_T: torch.Tensor) -> torch.Tensor:
        # Queries see no padded key, so what these read gets gradient zero.
        return self.pad(x_T) if self.key_from_L is None else x_T.index_select(0, self.key_from_L)


def line_length(num_tokens: int) -> int:
    """Return the length that a piece may be padded to: a power of two up to 64, then quarters of an octave.

    Pieces that share it share a rectangle, padded to the longest of them. The waste is below one quarter for
    long ones, and the number of rectangles, each a call per layer, stays logarithmic.
    """
    octave = 1 << max(0, num_tokens - 1).bit_length()
    if octave <= 64:
        return max(SHORTEST_LINE, octave)
    quarter = octave // 8
    return -(-num_tokens // quarter) * quarter


def _attend_lines(
    rectangle: Rectangle,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    q, k, v = (x.unflatten(0, (rectangle.num_lines, -1)).transpose(1, 2) for x in (query, key, value))
    mask = rectangle.mask
    if window is not None and window < rectangle.num_keys:
        assert mask is None, "a window is for whole rows"
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril().triu(1 - window)
    with sdpa_kernel(GPU_KERNELS) if q.device.type == "cuda" else contextlib.nullcontext():
        output = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return output.transpose(1, 2).flatten(0, 1)


def _spread(starts_P: torch.Tensor, counts_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions [P, longest] from each start on, 0 behind each count, and which are within it."""
    column = torch.arange(int(counts_P.max()))
    is_within = column < counts_P[:, None]
    return torch.where(is_within, starts_P[:, None] + column, 0), is_within


def _mask(num_queries_P: torch.Tensor, num_keys_P: torch.Tensor) -> torch.Tensor:
    """Return [P, 1, Q, W]: the keys up to the query's own; a padded query sees its piece's at least."""
    query_Q, key_W = torch.arange(int(num_queries_P.max())), torch.arange(int(num_keys_P.max()))
    return (num_keys_P - num_queries_P)[:, None, None, None] + query_Q[:, None] >= key_W


class _Context(Protocol):
    layout: RectanglePieces
    shape: torch.Size


class _Pad(torch.autograd.Function):
    """Packed to padded: forward [N, ...] -> [M, ...], backward the other way.

    A padded position reads packed position 0 and gives no gradient back. That is exact because `_Unpad`
    sends gradient zero to it, and causal queries before it do not see its key. The backward pass gathers,
    where that of a plain `index_select` would add up.
    """

    @staticmethod
    def forward(ctx: _Context, x_N: torch.Tensor, layout: RectanglePieces) -> torch.Tensor:
        ctx.layout = layout
        return x_N.index_select(0, layout.query_from_M)

    @staticmethod
    def backward(ctx: _Context, gradient_M: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient_M.index_select(0, ctx.layout.output_from_N), None


class _Unpad(torch.autograd.Function):
    """Padded to packed: forward [M, ...] -> [N, ...]; padding gets gradient zero."""

    @staticmethod
    def forward(ctx: _Context, x_M: torch.Tensor, layout: RectanglePieces) -> torch.Tensor:
        ctx.layout, ctx.shape = layout, x_M.shape
        return x_M.index_select(0, layout.output_from_N)

    @staticmethod
    def backward(ctx: _Context, gradient_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient_M = gradient_N.new_zeros(ctx.shape)
        return gradient_M.index_copy_(0, ctx.layout.output_from_N, gradient_N), None
