"""Shared prompts: the tokens that rows of a group begin with, computed once for all of them.

Owns what a model computes of a microbatch then (the positions of its prefix tree, and each label once), the
way back to packed positions, and the units that microbatches are planned by: rows that share stay together.
Must never change what comes out: each packed position has the output of its row alone, and a gradient is the
sum over the rows that share. Tokens with other recorded experts are not shared. Invariant: whether a group
shares depends on its rows alone, so that every pass over it, of any model, goes the same way.

Shapes: N packed positions, M positions of the tree, E pairs of a position of the tree and a label.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from learner.attention.prefix_tree import PrefixTree, Run, build_tree, cut_rows, find_runs, members_of
from learner.batching.balance import LINEAR_COST, plan_microbatches
from learner.batching.batch import PackedBatch


@dataclass(frozen=True, eq=False)
class SharedRows:
    """A microbatch as a model computes it, once per token of its tree.

    A token that several rows share has a label in each, and so may have several outputs: the last of a prompt
    has one per answer.

    Attributes:
        tree: With the padding that was asked for.
        tree_from_E: The position of each pair.
        entry_from_N: The pair of each packed position.
    """

    tree: PrefixTree
    tokens_M: torch.Tensor
    labels_E: torch.Tensor
    tree_from_E: torch.Tensor
    entry_from_N: torch.Tensor

    def take(self, hidden_M: torch.Tensor) -> torch.Tensor:
        """Return the hidden state of each pair [E, ...]; a position's gradient is the sum over its pairs."""
        return hidden_M.index_select(0, self.tree_from_E)

    def spread(self, outputs_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs of packed positions [..., N]."""
        return outputs_E.index_select(-1, self.entry_from_N)


class Unit(NamedTuple):
    """Rows that go into one microbatch together, the tokens computed for them, and their work."""

    rows: tuple[int, ...]
    num_tokens: int
    workload: float


class Work(NamedTuple):
    """Work of a forward pass: positions, and pairs of a query and a key that it sees."""

    num_tokens: int
    num_pairs: float


def share_prompts(batch: PackedBatch, multiple_of: int = 1) -> SharedRows | None:
    """Return how `batch`, on the CPU, is computed once per token of its tree; None where nothing is shared.

    Args:
        multiple_of: Of positions; those that pad the tree are a row of their own, of token 0.
    """
    if batch.num_rows < 2:
        return None
    tree = build_tree(_tell_apart(batch), batch.cu_seqlens, batch.group_R.tolist())
    if not tree.is_shared:
        return None
    tree = tree.pad(-tree.num_tokens % multiple_of)
    tokens_M = batch.tokens_N.new_zeros(tree.num_tokens)
    tokens_M[tree.tree_from_N] = batch.tokens_N
    num_labels = int(batch.labels_N.max()) + 1
    pairs_E, entry_from_N = torch.unique(tree.tree_from_N * num_labels + batch.labels_N, return_inverse=True)
    return SharedRows(tree, tokens_M, pairs_E % num_labels, pairs_E // num_labels, entry_from_N)


def measure_work(batch: PackedBatch, *, is_shared: bool) -> Work:
    """Return the work of a forward pass over `batch`, with prompts once per group or per row."""
    rows = cut_rows(_tell_apart(batch), batch.cu_seqlens)
    groups = members_of(batch.group_R.tolist()) if is_shared else [[row] for row in range(len(rows))]
    works = [_measure(find_runs([rows[row] for row in members])) for members in groups]
    return Work(sum(work.num_tokens for work in works), sum(work.num_pairs for work in works))


def plan_shared(batch: PackedBatch, max_tokens: int, min_parts: int, multiple_of: int) -> list[list[int]]:
    """As `plan_microbatches`, of units."""
    units = find_units(batch, max_tokens, min_parts)
    sizes, workloads = [unit.num_tokens for unit in units], [unit.workload for unit in units]
    plan = plan_microbatches(
        sizes, max_tokens, workloads=workloads, min_parts=min_parts, multiple_of=multiple_of
    )
    return [sorted(row for unit in part for row in units[unit].rows) for part in plan]


def find_units(batch: PackedBatch, max_tokens: int, min_units: int) -> list[Unit]:
    """Return the units of all rows: a group that shares, as far as it fits, or else a row.

    A group that does not fit is halved, and the largest where there are fewer than `min_units`: each part
    computes the prompt. No unit is over `max_tokens` if no row is.
    """
    rows = cut_rows(_tell_apart(batch), batch.cu_seqlens)

    def divide(members: Sequence[int]) -> Iterator[Unit]:
        runs = find_runs([rows[row] for row in members])
        work = _measure(runs)
        if len(members) > 1 and work.num_tokens > max_tokens:
            yield from halve(members)
        elif any(len(run.rows) > 1 for run in runs):
            yield _make_unit(members, work)
        else:
            for row, run in zip(members, runs, strict=True):
                yield _make_unit([row], _measure([run]))

    def halve(members: Sequence[int]) -> Iterator[Unit]:
        middle = len(members) // 2
        return itertools.chain(divide(members[:middle]), divide(members[middle:]))

    units = [unit for members in members_of(batch.group_R.tolist()) for unit in divide(members)]
    while len(units) < min(min_units, len(rows)):
        largest = max((unit for unit in units if len(unit.rows) > 1), key=lambda unit: unit.workload)
        units.remove(largest)
        units += halve(largest.rows)
    return units


def _tell_apart(batch: PackedBatch) -> torch.Tensor:
    """Return tokens [N], or with recorded experts a vector of both for each [N, W], int16."""
    if batch.experts_N is None:
        return batch.tokens_N
    return torch.cat([batch.tokens_N[:, None].view(torch.int16), batch.experts_N.flatten(1)], 1)


def _make_unit(rows: Sequence[int], work: Work) -> Unit:
    attention = 2 * work.num_pairs - work.num_tokens  # of a row: the square of its tokens
    return Unit(tuple(rows), work.num_tokens, LINEAR_COST * work.num_tokens + attention)


def _measure(runs: Sequence[Run]) -> Work:
    num_pairs, below = 0.0, [0] * len(runs)
    for number, run in reversed(list(enumerate(runs))):
        num_pairs += run.num_tokens * ((run.num_tokens + 1) / 2 + below[number])
        if run.parent >= 0:
            below[run.parent] += run.num_tokens + below[number]
    return Work(sum(run.num_tokens for run in runs), num_pairs)
