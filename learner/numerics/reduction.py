"""Metrics over microbatches and ranks, each reduced by its name's rule.

What is reduced as maximum or minimum says `asyncrl.core.metrics.extreme_of`; all else is summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from asyncrl.core.metrics import extreme_of

_RULES = (
    (None, dist.ReduceOp.SUM, torch.sum),
    ("max", dist.ReduceOp.MAX, torch.amax),
    ("min", dist.ReduceOp.MIN, torch.amin),
)


class ReducingGroup(Protocol):
    """Data-parallel ranks."""

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Return `values` reduced over the ranks, on the device."""


def reduce_metrics(metrics: Mapping[str, Sequence[torch.Tensor]], group: ReducingGroup) -> dict[str, float]:
    """Return one value per name from the values of this rank's microbatches; collective.

    The host waits for the device once.
    """
    names: list[str] = []
    totals: list[torch.Tensor] = []
    for rule, op, combine in _RULES:
        chosen = sorted(name for name in metrics if extreme_of(name) == rule)
        if chosen:
            values = [combine(torch.stack([value.detach() for value in metrics[name]])) for name in chosen]
            totals.append(group.all_reduce(torch.stack(values), op).double())
            names += chosen
    return dict(zip(names, torch.cat(totals).tolist() if totals else [], strict=True))


def average_metrics(
    metrics: Mapping[str, float], weight: float, group: ReducingGroup, num_ranks: int
) -> dict[str, float]:
    """Return metrics over all ranks: max, min, or the mean by `weight`; collective."""
    total = float(group.all_reduce(torch.tensor([weight], dtype=torch.float64), dist.ReduceOp.SUM)[0])
    share = weight / total if total else 1.0 / num_ranks
    # A rank without weight adds nothing to a mean, even if its value is not a number.
    shares = {name: value * share if share else 0.0 for name, value in metrics.items()}
    shares |= {name: value for name, value in metrics.items() if extreme_of(name)}
    tensors = {name: [torch.tensor(value, dtype=torch.float64)] for name, value in shares.items()}
    return reduce_metrics(tensors, group)
