"""Batches that come in parts: one without a group, and the batch that several are together.

Must never reorder: groups of a joined batch stand as their parts came, and not in ticket order.
Invariant: a joined batch has the totals of all its parts.

Shapes: N packed positions, R rows, G groups.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from learner.batching.batch import PackedBatch, Totals, count_totals


def make_empty(step: int) -> PackedBatch:
    """Return the batch of no group, which trains nothing."""
    whole, real = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    return PackedBatch(
        step=step,
        tokens_N=whole,
        labels_N=whole,
        loss_mask_N=real,
        counted_N=real,
        behaviour_N=real,
        version_N=whole,
        lag_N=whole,
        row_N=whole,
        cu_seqlens=(0,),
        group_R=whole,
        episode_R=whole,
        share_R=real,
        rewards_R=real,
        tickets_G=(),
        totals=Totals(0.0, 0.0, 0.0),
        baseline_R=real,
    )


def join_batches(parts: Sequence[PackedBatch]) -> PackedBatch:
    """Return one batch of the groups of all `parts`, in their order.

    A column that one part with rows lacks is left out; only `baseline_R` is NaN and `experts_N` -1 where a
    part has none.
    """
    filled = [part for part in parts if part.num_rows]
    if len(filled) < 2:
        return filled[0] if filled else parts[0]
    columns: dict[str, Any] = {
        field.name: _join_column([getattr(part, field.name) for part in filled])
        for field in dataclasses.fields(PackedBatch)
        if field.name.endswith(("_N", "_R"))
    }
    first_rows = _starts([part.num_rows for part in filled])
    first_groups = _starts([len(part.tickets_G) for part in filled])
    first_episodes = _starts([int(part.episode_R.max()) + 1 for part in filled])
    moved = {
        "row_N": [part.row_N + first for part, first in zip(filled, first_rows, strict=True)],
        "group_R": [part.group_R + first for part, first in zip(filled, first_groups, strict=True)],
        "episode_R": [part.episode_R + first for part, first in zip(filled, first_episodes, strict=True)],
        "baseline_R": _fill_baselines(filled),
        "experts_N": _fill_experts(filled),
    }
    lengths = [length for part in filled for length in part.row_lengths]
    joined = dataclasses.replace(
        filled[0],
        **columns | {name: torch.cat(found) for name, found in moved.items() if found},
        cu_seqlens=(*_starts(lengths), sum(lengths)),
        tickets_G=tuple(ticket for part in filled for ticket in part.tickets_G),
    )
    return dataclasses.replace(joined, totals=count_totals(joined))


def _join_column(values: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [value for value in values if value is not None]
    return torch.cat(found) if len(found) == len(values) else None


def _fill_baselines(parts: Sequence[PackedBatch]) -> list[torch.Tensor]:
    if all(part.baseline_R is None for part in parts):
        return []
    none = float("nan")
    return [
        torch.full_like(part.rewards_R, none) if part.baseline_R is None else part.baseline_R
        for part in parts
    ]


def _fill_experts(parts: Sequence[PackedBatch]) -> list[torch.Tensor]:
    found = [part.experts_N for part in parts if part.experts_N is not None]
    return [
        found[0].new_full((part.num_tokens, *found[0].shape[1:]), -1)
        if part.experts_N is None
        else part.experts_N
        for part in parts
        if found
    ]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][: len(sizes)]
