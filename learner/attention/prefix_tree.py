"""Prefix trees of packed rows: a token that rows of one group share with all before it is there once (pure).

Owns which rows share. Segments stand in depth-first order, so that those below a segment lie right behind it:
the queries that see a segment's keys are one range of the tree. Must never look at anything but groups and
tokens (or a vector for each, which tells it from an equal one with other recorded experts): every pass over a
group shares alike. Invariant: the path to a position of the tree has the tokens of every row that runs
through it, from the row's first on.

Shapes: N packed positions, R rows, M positions of the tree, W entries of a token's vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

MIN_SAVED = 64
"""Tokens that a segment must save over its rows: it costs calls in each layer, as much as 50 tokens do in one
of 64 channels, and less in wider ones."""
MIN_GAIN = 0.1
"""Tokens that must be saved for each one that is left, or a group's rows stay as they are."""

Tokens = npt.NDArray[np.signedinteger]
"""Of one row: [T], or a vector for each [T, W]."""


class Segment(NamedTuple):
    """A run of shared tokens: positions [start, end) of the tree; those below it are [end, below).

    `parent` is the number of the segment before it, -1 at the beginning of a row.
    """

    start: int
    end: int
    below: int
    parent: int


class Run(NamedTuple):
    """Tokens [first, end) of each of `rows`, which are the same; `parent` is a number of a run."""

    rows: tuple[int, ...]
    first: int
    end: int
    parent: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The tree of several groups.

    Attributes:
        positions_M: Of each token in the rows that run through it.
        tree_from_N: Where each packed position lies in the tree.
    """

    segments: tuple[Segment, ...]
    positions_M: torch.Tensor
    tree_from_N: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.positions_M)

    @property
    def is_shared(self) -> bool:
        """Whether the tree has fewer tokens than the rows."""
        return self.num_tokens < len(self.tree_from_N)

    def pad(self, num_tokens: int) -> PrefixTree:
        """Return the tree with a segment of so many positions more, which no row runs through."""
        if not num_tokens:
            return self
        end = self.num_tokens + num_tokens
        segments = (*self.segments, Segment(self.num_tokens, end, end, -1))
        positions_M = torch.cat([self.positions_M, torch.arange(num_tokens)])
        return PrefixTree(segments, positions_M, self.tree_from_N)


def build_tree(
    tokens_N: torch.Tensor, cu_seqlens: Sequence[int], group_R: Sequence[int], min_saved: int = MIN_SAVED
) -> PrefixTree:
    """Return the tree of packed rows [N] or [N, W], the groups one after another; see `find_runs`."""
    rows = cut_rows(tokens_N, cu_seqlens)
    tree_from_N = np.empty(cu_seqlens[-1], np.int64)
    segments: list[Segment] = []
    positions: list[Tokens] = []
    size = 0
    for members in members_of(group_R):
        runs, first = find_runs([rows[row] for row in members], min_saved), len(segments)
        for run in runs:
            for row in run.rows:
                start = cu_seqlens[members[row]]
                tree_from_N[start + run.first : start + run.end] = np.arange(size, size + run.num_tokens)
            positions.append(np.arange(run.first, run.end))
            parent = run.parent + first if run.parent >= 0 else -1
            segments.append(Segment(size, size + run.num_tokens, size + run.num_tokens, parent))
            size += run.num_tokens
    places = torch.from_numpy(np.concatenate(positions))
    return PrefixTree(_find_ends(segments), places, torch.from_numpy(tree_from_N))


def find_runs(rows: Sequence[Tokens], min_saved: int = MIN_SAVED) -> list[Run]:
    """Return the runs of one group's rows in depth-first order; whole rows where sharing saves too little."""
    runs = _cut_runs(rows, min_saved)
    num_left = sum(run.num_tokens for run in runs)
    if sum(map(len, rows)) - num_left < MIN_GAIN * num_left:
        return [Run((row,), 0, len(tokens), -1) for row, tokens in enumerate(rows)]
    return runs


def cut_rows(tokens_N: torch.Tensor, cu_seqlens: Sequence[int]) -> list[Tokens]:
    """Return the tokens of each row."""
    tokens: Tokens = tokens_N.numpy()
    return [tokens[start:end] for start, end in itertools.pairwise(cu_seqlens)]


def members_of(group_R: Sequence[int]) -> list[list[int]]:
    """Return the rows of each group, ascending."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(group_R):
        members.setdefault(int(group), []).append(row)
    return list(members.values())


def _cut_runs(rows: Sequence[Tokens], min_saved: int) -> list[Run]:
    order = sorted(
        range(len(rows)), key=lambda row: rows[row].astype(rows[row].dtype.newbyteorder(">")).tobytes()
    )
    shared = [0, *(_count_shared(rows[one], rows[other]) for one, other in itertools.pairwise(order))]
    runs: list[Run] = []
    todo = [
        (0, len(order), 0, -1)
    ]  # neighbours in `order`, the tokens that they have behind them, the last run
    while todo:
        low, high, first, parent = todo.pop()
        is_alone = high - low == 1
        end = len(rows[order[low]]) if is_alone else min(shared[low + 1 : high])
        if end > first and (is_alone or (end - first) * (high - low - 1) >= min_saved):
            runs.append(Run(tuple(order[low:high]), first, end, parent))
            first, parent = end, len(runs) - 1
        if not is_alone:
            todo += reversed([(*part, first, parent) for part in _split(shared, low, high, end)])
    return runs


def _split(shared: Sequence[int], low: int, high: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [low, high) whose rows have more than `end` tokens alike."""
    bounds = [low, *(row for row in range(low + 1, high) if shared[row] == end), high]
    return itertools.pairwise(bounds)


def _count_shared(one: Tokens, other: Tokens) -> int:
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    places = np.flatnonzero(differs.any(-1) if differs.ndim > 1 else differs)
    return int(places[0]) if len(places) else size


def _find_ends(segments: list[Segment]) -> tuple[Segment, ...]:
    below = [segment.end for segment in segments]
    for number in reversed(range(len(segments))):
        parent = segments[number].parent
        if parent >= 0:
            below[parent] = max(below[parent], below[number])
    return tuple(segment._replace(below=end) for segment, end in zip(segments, below, strict=True))
