"""Cascade by the variable-length kernel of a GPU: one call for all segments, then one per depth of the tree.

The first call is causal, each segment's queries with its own keys. The call of a depth is not causal: all
queries below the segments of that depth with the keys of these. Not run on a GPU yet.

Shapes: M positions of the tree, Q and K queries and keys of one call, h query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from learner.attention.cascade import Cascade, Heads, Merged, merge_part
from learner.attention.pieces import runs
from learner.attention.prefix_tree import PrefixTree, Segment
from learner.numerics.transfer import send_fields


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[object],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's outputs [Q, h, D] and log-sum-exp [h, Q]; `lengths` as `Call.lengths` has them."""
    *offsets, is_causal = lengths
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, *offsets, 0.0, is_causal, False, scale=scale
    )
    output: torch.Tensor = found[0]
    return output, found[1]


def flash_backward(
    gradient: torch.Tensor,
    heads: Heads,
    output: torch.Tensor,
    lse_hQ: torch.Tensor,
    lengths: Sequence[object],
    scale: float | None,
) -> Heads:
    """Return torch's gradients of `heads`."""
    *offsets, is_causal = lengths
    state = torch.zeros(2, dtype=torch.uint64, device=output.device)  # of a dropout that there is none of
    grads: Heads = torch.ops.aten._flash_attention_backward(
        gradient, *heads, output, lse_hQ, *offsets, 0.0, is_causal, state, state.new_empty(0), scale=scale
    )
    return grads


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the kernel.

    Attributes:
        queries_Q: Where its queries lie in the tree; None if they are all.
        keys_K: Where its keys lie; None if they are all.
        query_offsets, key_offsets: Where its pieces begin and end, int32.
    """

    queries_Q: torch.Tensor | None
    keys_K: torch.Tensor | None
    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(
        cls, queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], *, is_whole: bool
    ) -> Call:
        """Return the call of pieces whose queries and keys lie in those ranges [start, end) of the tree."""
        starts, lengths = zip(*(_measure(ranges) for ranges in (queries, keys)), strict=True)
        offsets = [torch.nn.functional.pad(length.cumsum(0), (1, 0)).int() for length in lengths]
        places = [None if is_whole else runs(*one) for one in zip(starts, lengths, strict=True)]
        max_queries, max_keys = (int(length.max()) for length in lengths)
        return cls(places[0], places[1], offsets[0], offsets[1], max_queries, max_keys)

    @property
    def lengths(self) -> tuple[object, ...]:
        """What the kernel is told of the pieces, and whether they are causal."""
        offsets = (self.query_offsets, self.key_offsets, self.max_queries, self.max_keys)
        return (*offsets, self.queries_Q is None)

    def take(self, heads: Heads) -> Heads:
        """Return its queries, keys and values."""
        query, key, value = heads
        if self.queries_Q is None or self.keys_K is None:
            return heads
        return query[self.queries_Q], key[self.keys_K], value[self.keys_K]


@dataclass(frozen=True, eq=False)
class VarlenCascade(Cascade):
    """The tree as calls of the kernel, that of all segments first."""

    calls: tuple[Call, ...]

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device) -> VarlenCascade:
        """Return the form of `tree` on `device`."""
        own = [(segment.start, segment.end) for segment in tree.segments]
        calls = [Call.of(own, own, is_whole=True)]
        for level in _levels(tree.segments):
            below, keys = [(s.end, s.below) for s in level], [(s.start, s.end) for s in level]
            calls.append(Call.of(below, keys, is_whole=False))
        return cls(tuple(send_fields(call, device) for call in calls))

    def forward(self, heads: Heads, scale: float | None) -> Merged:
        first, *others = self.calls
        output_MhD, lse_hM = flash(*first.take(heads), first.lengths, scale)
        lse_Mh = lse_hM.T.contiguous()
        for call in others:
            part, part_lse_hQ = flash(*call.take(heads), call.lengths, scale)
            output, lse = output_MhD[call.queries_Q], lse_Mh[call.queries_Q]
            merge_part(output, lse, part, part_lse_hQ.T)
            output_MhD[call.queries_Q], lse_Mh[call.queries_Q] = output, lse
        return output_MhD, lse_Mh

    def backward(
        self, gradient_MhD: torch.Tensor, heads: Heads, merged: Merged, scale: float | None
    ) -> Heads:
        """No position comes twice in a call: parts are added without atomics."""
        output_MhD, lse_Mh = merged
        first, *others = self.calls
        gradient_MhD, lse_hM = gradient_MhD.contiguous(), lse_Mh.T.contiguous()
        grads = flash_backward(gradient_MhD, heads, output_MhD, lse_hM, first.lengths, scale)
        for call in others:
            queries = call.queries_Q
            lse_hQ = lse_hM[:, queries].contiguous()
            whole = (gradient_MhD[queries], call.take(heads), output_MhD[queries], lse_hQ)
            parts = flash_backward(*whole, call.lengths, scale)
            for grad, where, part in zip(grads, (queries, call.keys_K, call.keys_K), parts, strict=True):
                grad[where] += part
        return grads


def _measure(ranges: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where they start, and their lengths."""
    starts, ends = torch.tensor(list(ranges)).T
    return starts, ends - starts


def _levels(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return the segments with others below, by depth."""
    depths: list[int] = []
    levels: dict[int, list[Segment]] = {}
    for segment in segments:
        depths.append(depths[segment.parent] + 1 if segment.parent >= 0 else 0)
        if segment.below > segment.end:
            levels.setdefault(depths[-1], []).append(segment)
    return list(levels.values())
